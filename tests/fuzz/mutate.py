"""Mutators of bytes and of structure: JSON, safetensors headers, files of a folder.

Number ``i`` of a target is always the same input, so a finding can be made again from its number alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fuzz.target import Input

_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *(
        "",
        "a",
        "0",
        "\0",
        "\ud800",
        "é",
        "\U0001f600",
        "../../../etc/passwd",
        "/etc/passwd",
        "__class__",
        "%s%n",
        "NaN",
    ),
    *("A" * 100_000, "float32", "int64", "None", "null", "a.b.c", "a" * 300, " ", "\n", "[1, 2", "x" * 5 + "\ufffd"),
)
_MAX_NBYTES = 1 << 20


def mutated(seeds: Sequence[Input], words: Sequence[str], rng: Random) -> Input:
    """Return a seed with a few changes."""
    seed = rng.choice(seeds)
    if isinstance(seed, bytes):
        return _content(seed, seeds, words, rng)
    files = dict(seed)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(files))
        chance = rng.random()
        if chance < 0.03 and len(files) > 1:
            del files[name]
        elif chance < 0.05:
            files[name] = files[rng.choice(sorted(files))]
        else:
            contents: list[Input] = list(files.values())
            files[name] = _content(files[name], contents, words, rng)
    return files


def _content(content: bytes, others: Sequence[Input], words: Sequence[str], rng: Random) -> bytes:
    if rng.random() < 0.8:
        made = _as_json(content, words, rng) or _as_safetensors(content, words, rng)
        if made is not None:
            return made
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        content = _bytes(content, others, words, rng)
    return content[:_MAX_NBYTES]


def _as_json(content: bytes, words: Sequence[str], rng: Random) -> bytes | None:
    """Return JSON with another structure; None if it is no JSON. Lines of JSON: one line is changed."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        lines = content.split(b"\n")
        if len(lines) < 2 or not lines[0].startswith(b"{"):
            return None
        at = rng.randrange(len(lines))
        lines[at] = _as_json(lines[at], words, rng) or lines[rng.randrange(len(lines))] if lines[at] else b"{}"
        return b"\n".join(lines)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _structure(value, words, rng)
    return json.dumps(value).encode("utf-8", "surrogatepass")[:_MAX_NBYTES]


def _structure(value: Any, words: Sequence[str], rng: Random) -> Any:
    """Change one element of a JSON value, which is taken apart."""
    slots: list[tuple[Any, Any]] = []
    stack = [value]
    while stack and len(slots) < 5000:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        slots += [(node, key) for key in keys]
        stack += [node[key] for key in keys]
    if not slots:
        return hostile(words, rng)
    node, key = rng.choice(slots)
    chance = rng.random()
    if chance < 0.55:
        node[key] = hostile(words, rng)
    elif chance < 0.65:
        del node[key]
    elif chance < 0.75:
        other, slot = rng.choice(slots)
        node[key] = json.loads(json.dumps(other[slot])) if slot in other or isinstance(slot, int) else None
    elif chance < 0.83 and isinstance(node[key], str):
        node[key] = _text(node[key], words, rng)
    elif chance < 0.9 and isinstance(node[key], int | float):
        node[key] = node[key] + rng.choice((1, -1, 1000, -1000)) if not isinstance(node[key], bool) else 7
    elif isinstance(node, dict):
        node[rng.choice((*words, *_TEXTS[:20], "x")) or "y"] = node.pop(key)
    else:
        node.insert(rng.randrange(len(node) + 1), hostile(words, rng))
    return value


def hostile(words: Sequence[str], rng: Random) -> Any:
    """Return a value that a parser may not expect."""
    chance = rng.random()
    if chance < 0.3:
        return rng.choice(_NUMBERS)
    if chance < 0.45:
        return rng.choice(_TEXTS)
    if chance < 0.6 and words:
        return rng.choice(words)
    if chance < 0.7:
        return rng.choice((None, True, False))
    if chance < 0.75:
        nested: Any = rng.choice(([], {}, 1))
        for _ in range(rng.choice((3, 60, 500))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    if chance < 0.8:
        return [rng.choice(_NUMBERS[:8])] * rng.choice((2, 100, 20_000))
    return rng.choice(([], {}, [[]], {"a": 1}, [None], [1, "a"], {"": ""}, [-1, 2], {"a": {"b": []}}))


def _text(text: str, words: Sequence[str], rng: Random) -> str:
    at = rng.randrange(len(text) + 1)
    piece = rng.choice((*words, *_TEXTS)) if rng.random() < 0.6 else chr(rng.randrange(1, 0x250))
    return text[:at] + piece + text[at + rng.choice((0, 0, 1, 5)) :]


def _as_safetensors(content: bytes, words: Sequence[str], rng: Random) -> bytes | None:
    """Return a safetensors file with another header; None if it is none."""
    if len(content) < 10 or content[8:9] != b"{":
        return None
    length = struct.unpack_from("<Q", content)[0]
    header = _as_json(content[8 : 8 + length], words, rng) if length < len(content) else None
    return None if header is None else struct.pack("<Q", len(header)) + header + content[8 + length :]


def _bytes(content: bytes, others: Sequence[Input], words: Sequence[str], rng: Random) -> bytes:
    changed = bytearray(content)
    at, chance = rng.randrange(len(changed) + 1), rng.random()
    if chance < 0.25 and changed:
        at = min(at, len(changed) - 1)
        changed[at] ^= 1 << rng.randrange(8)
    elif chance < 0.45:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice((0, 1, -1, 127, -128, 1 << (8 * size - 1), (1 << 8 * size) - 1, rng.getrandbits(8 * size)))
        changed[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif chance < 0.55:
        del changed[at : at + rng.choice((1, 2, 8, 64, 1000))]
    elif chance < 0.65:
        changed[at:at] = changed[at : at + rng.choice((1, 8, 64, 1000))] * rng.choice((1, 2, 30))
    elif chance < 0.72:
        del changed[at:]
    elif chance < 0.8:
        changed[at:at] = rng.randbytes(rng.choice((1, 4, 16, 256)))
    elif chance < 0.95 or not others:
        piece = rng.choice((*words, *_TEXTS)).encode("utf-8", "surrogatepass")
        changed[at : at + rng.choice((0, len(piece)))] = piece
    else:
        other = rng.choice(others)
        if isinstance(other, bytes):
            cut = rng.randrange(len(other) + 1)
            changed[at:] = other[cut:]
    return bytes(changed)
