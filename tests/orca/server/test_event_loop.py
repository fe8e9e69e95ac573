"""Nothing that grows with a request runs on the event loop's thread, and nothing is done for what will be refused."""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api import chat, completions, intake, service, tokens
from mlsys_orca.api.intake import MAX_CONTAINERS, MAX_VALUES, bounded_json
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca.text.guides import GuideMaker
from mlsys_orca.text.tokenizer import Tokenizer
from mlsys_orca_gateway.messages import routes as messages
from mlsys_orca_gateway.responses import routes as responses
from mlsys_serving.http import BackgroundServer, HttpConfig, HttpError

from tests.orca.extended import serving

BLOCKING = [
    (Tokenizer, "encode"),
    (ChatTemplate, "encode"),
    (GuideMaker, "guides"),
    (intake, "read_body"),
    (service, "to_json"),
    (completions, "prompt_logprobs"),
    (completions, "completion"),
    (completions, "parameters_of"),
    (chat, "chat_completion"),
    (chat, "parameters_of"),
    (messages, "parameters_of"),
    (responses.Asked, "parameters"),
    (responses.Asked, "whole"),
    (tokens, "_tokens"),
    (tokens, "_text"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Record the threads that run each blocking call; the calls themselves run as ever."""
    seen: dict[str, set[str]] = defaultdict(set)

    def watched(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            seen[name].add(threading.current_thread().name)
            return call(*args, **options)

        return wrapper

    for owner, name in BLOCKING:
        key = f"{owner.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(owner, name, watched(key, getattr(owner, name)))
    return seen


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hey"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": ["hey", "he"], "n": 2, "logprobs": 3, "max_tokens": 3}),
    ("/v1/completions", {"model": "tiny", "prompt": "hey", "echo": True, "stream": True, "max_tokens": 3}),
    ("/v1/completions", {"model": "tiny", "prompt": "hey", "prompt_logprobs": 2, "max_tokens": 3}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "logprobs": True, "top_logprobs": 5, "n": 2}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "structured_outputs": {"regex": "[a-h]{2}"}, "n": 3}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "stream": True}),
    ("/v1/responses", {"model": "tiny", "input": "hey", "max_output_tokens": 3}),
    ("/v1/messages", CHAT | {"max_tokens": 3}),
    ("/tokenize", {"prompt": "hey " * 20, "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [3, 4]}),
]


def test_blocking_calls_never_run_on_the_event_loops_thread(serve, calls: dict[str, set[str]]) -> None:
    with serve() as (url, _):
        for path, body in BODIES:
            answer = httpx.post(f"{url}{path}", json=body, timeout=60)
            assert answer.status_code == 200, (path, body, answer.text)
        for path in {path for path, _ in BODIES}:
            refused = httpx.post(f"{url}{path}", json={"no_such_field": 1}, timeout=60)
            assert refused.status_code == 400
    used = {"Tokenizer.encode", "ChatTemplate.encode", "GuideMaker.guides", "intake.read_body", "service.to_json"}
    used |= {
        "completions.completion",
        "chat.chat_completion",
        "routes.parameters_of",
        "Asked.parameters",
        "Asked.whole",
    }
    assert used <= set(calls)
    for name, threads in calls.items():
        assert threads <= {"orca-front_0", "orca-front_1", "orca-front-large_0"}, name


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": ["x"] * 2048, "n": 128}, 400),  # 10 KB that held a server for seconds
        ("/v1/completions", {"prompt": ["x"] * 2048, "best_of": 128}, 400),
        ("/v1/completions", {"prompt": ["x"] * 13}, 400),  # 4 may run and 8 wait, whoever else is there
        ("/v1/completions", {"prompt": "x", "n": 13}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 13}, 400),
        ("/v1/completions", {"prompt": "x" * 70_000}, 400),
        ("/v1/completions", {"prompt": ["x", "x" * 70_000]}, 400),
        ("/v1/completions", {"prompt": [5] * 100}, 400),
        ("/v1/completions", {"prompt": ["x"], "model": "other", "n": 2}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 70_000}]}, 400),
        ("/v1/responses", {"input": "x" * 70_000}, 400),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 70_000}], "max_tokens": 2}, 400),
        ("/tokenize", {"prompt": "x" * 1_000_001}, 400),
    ],
)
def test_counts_and_lengths_are_checked_before_any_text_is_tokenised(
    serve, calls: dict[str, set[str]], path: str, body: dict[str, Any], status: int
) -> None:
    with serve(max_waiting=8) as (url, _):
        answer = httpx.post(f"{url}{path}", json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == status, answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert not {"Tokenizer.encode", "completions.completion"} & set(calls)


def test_so_many_answers_as_may_wait_are_taken_at_once(serve) -> None:
    with serve(max_waiting=8) as (url, _):
        body = {"model": "tiny", "prompt": ["he"] * 12, "max_tokens": 1}
        assert len(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]) == 12


CONFIG = HttpConfig(validation_status=400)
HOSTILE: dict[str, tuple[str, bytes | dict[str, Any]]] = {
    "a hundred thousand parts": (
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
    ),
    "five thousand messages": ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 5000}),
    "a bias for all": ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(50_000)}}),
    "a million stops": ("/v1/completions", {"prompt": "x", "stop": ["a"] * 400_000}),
    "stop ids": ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 400_000}),
    "fields": ("/v1/completions", {f"field{i}": 1 for i in range(100_000)}),
    "lists": ("/v1/completions", b'{"model": "tiny", "prompt": [' + b"[]," * 2_000_000 + b"[]]}"),
    "texts": ("/v1/completions", b'{"model": "tiny", "prompt": [' + b'"",' * 2_000_000 + b'""]}'),
    "wrong ids": ("/v1/completions", {"prompt": [True] * 400_000}),
    "wrong lists of ids": ("/v1/completions", {"prompt": [[True] * 200] * 2000}),
    "deep": ("/v1/chat/completions", b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "huge number": ("/v1/completions", b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"),
    "long number": ("/v1/completions", b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 400 + b"}"),
    "infinite": ("/v1/completions", b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'),
    "nan": ("/v1/completions", b'{"model": "tiny", "prompt": "x", "temperature": NaN}'),
    "half a pair": ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}'),
    "no utf-8": ("/v1/completions", b'{"model": "tiny", "prompt": "\xff"}'),
    "arguments": (
        "/v1/chat/completions",
        CHAT
        | {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 30_000}}],
                },
                *CHAT["messages"],
            ]
        },
    ),
    "a schema too deep": (
        "/v1/chat/completions",
        CHAT | {"structured_outputs": {"json": json.loads('{"not":' * 60 + "{}" + "}" * 60)}},
    ),
    "a schema too wide": (
        "/v1/chat/completions",
        CHAT
        | {
            "structured_outputs": {
                "json": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "integer"} for i in range(18_000)},
                    "required": [f"p{i}" for i in range(18_000)],
                }
            }
        },
    ),
    "a regular expression that is none": ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "(" * 9000}}),
    "a grammar in a circle": ("/v1/chat/completions", CHAT | {"structured_outputs": {"grammar": "start: start"}}),
    "deep grammar": ("/v1/chat/completions", CHAT | {"structured_outputs": {"grammar": "start: " + "(" * 40_000}}),
    "deep gbnf": ("/v1/chat/completions", CHAT | {"structured_outputs": {"grammar": "root ::= " + "(" * 40_000}}),
    "detokenize": ("/detokenize", {"tokens": [2**31 - 1] * 400_000}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_get_a_4xx_of_one_line_and_the_next_client_its_answer(hostile_server: str, name: str) -> None:
    path, body = HOSTILE[name]
    content = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{hostile_server}{path}", content=content, headers=headers, timeout=120)
    assert 400 <= answer.status_code < 500, answer.text[:500]
    message = answer.json()["error"]["message"]
    assert 0 < len(message) <= 1000
    assert "Traceback" not in message
    after = httpx.post(f"{hostile_server}/v1/completions", json={"model": "tiny", "prompt": "he", "max_tokens": 2})
    assert after.status_code == 200


@pytest.fixture(scope="module")
def hostile_server(tiny_gguf: Path) -> Iterator[str]:
    """A server with the limits of the command, shared."""
    service = make_service(load_model(tiny_gguf, dtype="fp32"), "tiny", EngineConfig(max_model_len=96, max_waiting=256))
    with serving(service, HttpConfig(validation_status=400)) as url:
        yield url


def test_values_are_counted_without_those_that_stand_in_texts() -> None:
    inside = json.dumps({"prompt": '[{,"\\' * (MAX_VALUES + 1)}).encode()
    assert len(bounded_json(inside)["prompt"]) == 5 * (MAX_VALUES + 1)
    assert len(bounded_json(b"[" + b"1," * (MAX_VALUES - 3) + b"1]")) == MAX_VALUES - 2
    escapes = b'"' + b",\\\\" * MAX_VALUES + b',\\"' * MAX_VALUES + b'"'  # runs that no piece may cut in two
    for shift in range(4):
        assert len(bounded_json(b" " * shift + escapes)) == 4 * MAX_VALUES
    for many in (b"[" + b"1," * MAX_VALUES + b"1]", b"[" + b"{}," * MAX_CONTAINERS + b"{}]"):
        with pytest.raises(HttpError, match="at most"):
            bounded_json(many)


def test_the_engine_refuses_for_ever_what_never_fits(serve) -> None:
    with serve(max_batch_size=2, max_waiting=3) as (_, engine):
        engine.check_room(5)
        with pytest.raises(InvalidInputError, match="at most 5"):
            engine.check_room(6)


LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5] * 400_000}),
    ("/v1/completions", {"prompt": [[5] * 200] * 2000, "n": 2}),
    ("/v1/completions", {"prompt": "x" * 2_000_000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 4000}),
    ("/tokenize", {"prompt": "x " * 400_000}),
    ("/detokenize", {"tokens": [5] * 400_000}),
]


@pytest.mark.parametrize(("path", "body"), LONG)
def test_the_event_loops_thread_makes_few_calls_for_a_large_body(
    tiny_gguf: Path, path: str, body: dict[str, Any]
) -> None:
    app = make_app(make_service(load_model(tiny_gguf, dtype="fp32"), "tiny", EngineConfig(max_model_len=96)), CONFIG)
    num_calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    async def begin() -> None:  # in the event loop's thread
        sys.setprofile(count)

    async def end() -> int:
        sys.setprofile(None)
        return num_calls

    app.add_api_route("/begin", begin)
    app.add_api_route("/end", end)
    with BackgroundServer(app) as server:
        assert httpx.get(f"{server.url}/begin").status_code == 200
        assert httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}).status_code < 500
        assert 0 < httpx.get(f"{server.url}/end").json() < 20_000  # most of them to receive the body in parts
