"""Bodies that mean harm: known ones, and real ones in which something was replaced, by a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["x"], "seed": 1}),
    ("/v1/chat/completions", CHAT | {"response_format": _FORMAT}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "[a-z]+"}, "stream": True}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"grammar": 'start: "a" | "b"'}}),
    ("/v1/chat/completions", CHAT | {"tools": [_TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"model": "tiny", "prompt": "Hello", "logit_bias": {"5": 1.0}, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"model": "tiny", "prompt": ["Hello", "there"], "max_tokens": 2, "best_of": 3, "n": 2}),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4]], "max_tokens": 2, "prompt_logprobs": 2}),
    ("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "metadata": {"a": "b"}}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    ("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]  # fmt: skip


def _deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


_VALUES: list[Any] = [
    None, True, 0, -1, 2**63, -(2**70), 10**300, 1.5, -0.0, 1e308, "", " ", "a", "\x00", "\ufdd0", "\U0001f600" * 1000,
    "a" * 100_000, "<|im_end|>" * 5000, "[" * 5000, "(a+)+$" * 100, [], {}, [[]], [None] * 1000, ["x"] * 3000,
    [1] * 20_000, [0.5] * 5000, {"a": {}}, {str(number): number for number in range(3000)}, _deep(30), _deep(60),
    [{"type": "text", "text": "x"}] * 3000, "{% raw %}{{ 7*7 }}", "../../etc/passwd", "tiny ",
]  # fmt: skip


def known() -> list[tuple[str, bytes]]:
    """Return the bodies that once did harm, and their like; some have megabytes."""
    parts = [{"type": "text", "text": "x"}] * 100_000
    asked: list[tuple[str, Any]] = [
        ("/v1/completions", {"model": "tiny", "prompt": ["x"] * 2048, "n": 128}),
        ("/v1/completions", {"model": "tiny", "prompt": ["x y z " * 30] * 200, "n": 1, "max_tokens": 1}),
        ("/v1/completions", {"model": "tiny", "prompt": "word " * 3_000_000}),
        ("/v1/completions", {"model": "tiny", "prompt": "a" * 15_000_000}),
        ("/v1/completions", {"model": "tiny", "prompt": ["b" * 30_000] * 250, "max_tokens": 1}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "logit_bias": {str(i): 1 for i in range(400_000)}}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stop": ["a"] * 400_000}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": parts}]}),
        ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 4000}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "<|im_start|>" * 60_000}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "🙂" * 60_000}]}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": _deep(60)}}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"choice": [f"choice {i}" for i in range(1000)]}}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "((a{0,999}){0,999}){0,999}b"}, "n": 64}),
        ("/v1/chat/completions", CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 8}),
        ("/tokenize", {"prompt": "token " * 160_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [300] * 400_000}),
    ]
    raw = [
        b'{"model": "tiny", "prompt": [' + b"[]," * 4_000_000 + b"[]]}",
        b'{"model": "tiny", "prompt": [' + b"1," * 7_000_000 + b"1]}",
        b'{"model": "tiny", "prompt": [' + b'"",' * 5_000_000 + b'""]}',
        b'{"model": ' + b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"model": "tiny", "prompt": "' + b"\\ud83d" * 1_000_000 + b'"}',
        b'{"model": "tiny", "max_tokens": ' + b"9" * 5_000_000 + b"}",
        b"\xff" * 1_000_000,
    ]
    return [(path, json.dumps(body).encode()) for path, body in asked] + [("/v1/completions", body) for body in raw]


def mutated(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield bodies without end, each a real one with something of it replaced, doubled, left out or cut."""
    chance = random.Random(seed)
    while True:
        path, body = chance.choice(SEEDS)
        body = copy.deepcopy(body)
        for _ in range(chance.choice((1, 1, 2, 3))):
            _change(body, chance)
        try:
            content = json.dumps(body).encode()
        except (ValueError, RecursionError):
            continue
        if chance.random() < 0.2:
            content = _damaged(content, chance)
        yield path, content


def _change(body: dict[str, Any], chance: random.Random) -> None:
    owner: Any = body
    while True:
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        if not keys:
            return
        key = chance.choice(keys)
        inner = owner[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
            owner = inner
            continue
        kind = chance.random()
        if kind < 0.75:
            owner[key] = copy.deepcopy(chance.choice(_VALUES))
        elif kind < 0.85:
            del owner[key]
        elif isinstance(owner, list):
            owner *= chance.choice((2, 100))
        else:
            owner[chance.choice(("n", "best_of", "suffix", "tools", "no_such_field", "user"))] = chance.choice(_VALUES)
        return


def _damaged(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    new = chance.choice((b"", b"\x00", b"\xff", b'"', b"\\", b"NaN", b"1e999", b"\\ud800", b"[" * 200, b"{", b","))
    return content[:at] + new + content[at + chance.choice((0, 1, 5)) :]
