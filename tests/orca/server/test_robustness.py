"""Requests that no client may make, and the server's answers to them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from mlsys_bench.orca.soak import soak
from mlsys_orca.engine.engine import Engine
from mlsys_orca_gateway.messages.routes import error_body
from mlsys_serving.http import ErrorInfo
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

ENDPOINTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]


def in_use(url: str) -> tuple[float, float]:
    """Unfinished requests and K/V blocks that they hold."""
    text = httpx.get(f"{url}/metrics").text
    names = ("num_requests_unfinished", "kv_blocks_used")
    return tuple(float(re.search(rf"^mlsys_orca_{name}\{{.*\}} (\S+)$", text, flags=re.M)[1]) for name in names)


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.02)


def test_every_operation_answers_whatever_comes_in_a_documented_way(serve) -> None:
    with serve() as (url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        names = []
        for result in schema.get_all_operations():
            operation = result.ok()
            names.append(operation.path)

            @given(case=operation.as_strategy())
            @settings(
                max_examples=12, database=None, derandomize=True, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=None)

            check()
        assert set(ENDPOINTS) < set(names)
        wait_until(lambda: in_use(url) == (0, 0))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe{}", 400),
        (b"[]", 400),
        (b'{"model": NaN}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800", "input": "\\ud800"}', 400),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 400),
        (b'{"model": 5, "prompt": {}, "messages": 7, "input": false, "max_tokens": "1"}', 400),
        (b'{"no_such_field": 1}', 400),
        (b" " * 3000, 413),
    ],
    ids=["cut", "encoding", "list", "nan", "surrogate", "deep", "types", "unknown", "huge"],
)
def test_bodies_that_are_none_get_a_4xx_in_its_shape(bounded: str, path: str, body: bytes, status: int) -> None:
    response = httpx.post(f"{bounded}{path}", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    if path == "/v1/messages":
        kind = {400: "invalid_request_error", 413: "request_too_large"}[status]
        assert_anthropics(response, kind)
    else:
        assert set(response.json()["error"]) >= {"message", "type", "code", "param"}


def assert_anthropics(response: httpx.Response, kind: str) -> None:
    body = response.json()
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": body["error"]["message"]},
        "request_id": response.headers["x-request-id"],
    }
    assert body["error"]["message"]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that takes bodies of 2,000 bytes, shared by this module's tests of bodies."""
    from mlsys_orca.api.server import make_service
    from mlsys_orca.engine.engine import EngineConfig
    from mlsys_orca.loading.load import load_model
    from mlsys_serving.http import HttpConfig

    from tests.orca.extended import serving

    conftest = _conftest_of_orca()
    path = conftest.write_gguf(
        tmp_path_factory.mktemp("tiny") / "tiny.gguf", conftest.tiny_metadata(), conftest.tiny_tensors()
    )
    service = make_service(load_model(path, dtype="fp32"), "tiny", EngineConfig(max_model_len=96))
    with serving(service, HttpConfig(validation_status=400, max_body_nbytes=2000)) as url:
        yield url


def _conftest_of_orca() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("orca_conftest", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_many_clients_who_leave_leak_nothing_and_spoil_nothing(serve) -> None:
    with serve(max_waiting=16, batch_invariant=True, num_kv_tokens=256) as (url, _):
        tally = asyncio.run(soak(url, "tiny", num_clients=40, seconds=3, questions=("a", "bc", "hello", "x y z")))
    assert tally.is_good, (tally.outcomes, tally.wrong[:3], tally.requests_left, tally.blocks_left)


def ask_messages(url: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 60} | options
    return httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=None)


def test_errors_of_messages_have_anthropics_shape(serve) -> None:
    with serve(http={"api_keys": ("secret",)}) as (url, engine):
        key = {"x-api-key": "secret"}
        assert_anthropics(ask_messages(url), "authentication_error")
        assert_anthropics(ask_messages(url, key, model="none"), "not_found_error")
        assert_anthropics(ask_messages(url, key, max_tokens=0), "invalid_request_error")
        assert_anthropics(ask_messages(url, key, max_tokens=500), "invalid_request_error")  # the context is shorter
        with held(engine):
            in_time = key | {"x-request-timeout-s": "0.3"}
            assert_anthropics(ask_messages(url, in_time, temperature=0), "timeout_error")
            streamed = ask_messages(url, in_time, stream=True, temperature=0).text  # a sampled end may come in time
        name, data = streamed.removesuffix("\n\n").split("\n")[-2:]
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (405, "invalid_request_error"), (403, "permission_error"),
     (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"), (501, "api_error"),
     (503, "overloaded_error")],
)  # fmt: skip
def test_classes_of_anthropics_errors_by_status(status: int, kind: str) -> None:
    info = ErrorInfo(status=status, type="t", code="c", message="m", path="/v1/messages", request_id="r")
    assert error_body(info) == {"type": "error", "error": {"type": kind, "message": "m"}, "request_id": "r"}


def completion(url: str, **options: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True} | options
    return httpx.post(f"{url}/v1/completions", json=body, timeout=None)


def test_a_full_queue_is_a_429_with_retry_after(serve) -> None:
    with serve(max_waiting=0, max_batch_size=1) as (url, engine):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 90, "ignore_eos": True, "stream": True}
        with held(engine), httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None):
            wait_until(lambda: in_use(url)[0] == 1)
            for endpoint, extra in (("completions", {"prompt": "x"}), ("completions", {"prompt": "x", "stream": True})):
                busy = httpx.post(f"{url}/v1/{endpoint}", json={"model": "tiny", **extra}, timeout=None)
                assert busy.status_code == 429, "also where a stream was asked for"
                assert int(busy.headers["retry-after"]) >= 1
                error = busy.json()["error"]
                assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        wait_until(lambda: in_use(url) == (0, 0))
        assert completion(url).status_code == 200


class held:  # noqa: N801 - reads as a word in a with statement
    """While it is open, each iteration of the engine takes so long more that an answer takes twenty seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.seconds = engine, 0.25

    def __enter__(self) -> held:
        held, runner = self, self._engine.core.runner
        self._run, model = runner.model, runner.model

        class Slow:
            def __call__(self, *args: Any) -> Any:
                time.sleep(held.seconds)
                return model(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(model, name)

        runner.model = Slow()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.core.runner.model = self._run


def test_a_deadline_ends_a_request_with_504_and_frees_it(serve) -> None:
    with serve() as (url, engine), held(engine):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 90, "ignore_eos": True}
        late = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-timeout-s": "0.3"}, timeout=None)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: in_use(url) == (0, 0))


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers_and_disturbs_nobody(serve) -> None:
    with serve() as (url, engine), held(engine) as slow:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(completion(url, max_tokens=40)))
        asking.start()
        wait_until(lambda: in_use(url)[0] == 1)
        long = completion(url, prompt="x" * 200)
        assert long.status_code == 400
        assert "context is 96 tokens; the prompt has 200" in long.json()["error"]["message"]
        assert long.json()["error"]["code"] == "context_length_exceeded"
        slow.seconds = 0.0
        asking.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 40


def test_one_who_leaves_is_gone_with_the_next_iteration(serve) -> None:
    with serve() as (url, engine), held(engine):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 90, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data"):
                pass
        wait_until(lambda: engine.stats.finished["abort"] == 1)
        generated = engine.stats.num_new_tokens
        wait_until(lambda: in_use(url) == (0, 0))
        assert engine.stats.num_new_tokens == generated < 90


def test_a_slow_reader_does_not_slow_the_rest(serve) -> None:
    with serve() as (url, _):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(
            {"model": "tiny", "prompt": "ab", "max_tokens": 90, "ignore_eos": True, "stream": True}
        ).encode()
        with socket.create_connection((host, int(port))) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)  # and read nothing
            for _ in range(5):
                assert completion(url, max_tokens=30).json()["usage"]["completion_tokens"] == 30
            wait_until(lambda: in_use(url) == (0, 0))  # the engine is done with it, read or not


def test_no_choice_of_many_is_left_when_one_leaves(serve) -> None:
    with serve() as (url, engine), held(engine):
        body = {"model": "tiny", "prompt": ["a", "b"], "n": 3, "max_tokens": 80, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as response:
            assert response.status_code == 200
            assert in_use(url)[0] == 6
        wait_until(lambda: in_use(url) == (0, 0))
