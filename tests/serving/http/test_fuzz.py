"""Whatever arrives, an echo route answers 2xx with the same value, or 4xx in the documented shape."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

from fastapi import FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlsys_serving.http import HttpConfig, Router, create_app
from mlsys_serving.http.record import make_logger
from pydantic import BaseModel

LIMIT = 4096


class Typed(BaseModel):
    name: str
    temperature: float = 1.0
    tags: list[str] = []
    extra: dict[str, Any] = {}


def _app() -> FastAPI:
    router = Router()

    @router.post("/echo")
    async def echo(body: Any) -> Any:
        return body

    @router.post("/untyped")
    async def untyped(body: dict[str, Any]):  # type: ignore[no-untyped-def]
        return body

    @router.post("/typed")
    async def typed(body: Typed, limit: int = 1) -> Typed:
        return body

    logger = make_logger("json", stream=io.StringIO())
    return create_app(HttpConfig(max_body_nbytes=LIMIT, request_timeout_s=30), routers=[router], logger=logger)


APP = _app()


async def _call(
    path: str, query: bytes, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
) -> tuple[int, bytes, dict[bytes, bytes]]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    waiting, sent = list(chunks), []

    async def receive() -> dict[str, Any]:
        if not waiting:
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.request", "body": waiting.pop(0), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    await APP(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, dict(sent[0]["headers"])


def _check(path: str, query: bytes, headers: list[tuple[bytes, bytes]], chunks: list[bytes]) -> None:
    status, body, response_headers = asyncio.run(_call(path, query, headers, chunks))
    assert status < 500, body
    value = json.loads(body)
    if status >= 400:
        assert set(value) == {"error"}
        assert set(value["error"]) == {"type", "code", "message", "param", "request_id"}
        assert value["error"]["request_id"].encode() == response_headers[b"x-request-id"]
        assert len(body) < 4000
    elif path != "/typed" and (b"content-type", b"application/json") in headers:
        assert value == json.loads(b"".join(chunks) or b"null")


names = st.sampled_from(
    [
        b"content-type",
        b"content-length",
        b"authorization",
        b"x-request-id",
        b"x-request-timeout-s",
        b"accept",
        b"cookie",
        b"expect",
        b"origin",
        b"transfer-encoding",
    ]
) | st.binary(min_size=1, max_size=10).map(bytes.lower)
texts = st.sampled_from([b"application/json", b"multipart/form-data", b"0", b"-1", b"1e9", b"nan", b"chunked", b";=,"])
raw_headers = st.lists(st.tuples(names, texts | st.binary(max_size=40)), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)
bodies = (
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | json_values.map(lambda value: json.dumps({"name": "n", "extra": {"e": value}, "tags": value}).encode())
    | st.integers(1, 3000).map(lambda depth: b"[" * depth + b"]" * depth)
    | st.integers(1, 700).map(lambda depth: b'{"a":' * depth + b"1" + b"}" * depth)
    | st.integers(1, 5000).map(lambda digits: b"1" * digits)
)
paths = st.sampled_from(["/echo", "/untyped", "/typed"])
JSON = [(b"content-type", b"application/json")]


@settings(max_examples=150)
@given(paths, bodies, st.integers(1, 3))
@example("/untyped", b'{"a": 1e400}', 1)
@example("/echo", b'"\\udfff"', 1)
@example("/untyped", b'{"\\ud800": 1}', 2)
@example("/echo", b"[" * 900 + b"]" * 900, 1)
@example("/untyped", b'{"a":' * 60 + b"1" + b"}" * 60, 1)
def test_random_json_bodies(path: str, body: bytes, num_chunks: int) -> None:
    step = max(1, len(body) // num_chunks)
    _check(path, b"", JSON, [body[start : start + step] for start in range(0, len(body), step)])


@settings(max_examples=150)
@given(paths, raw_headers, st.binary(max_size=40), st.lists(bodies, max_size=3))
@example("/echo", [(b"content-length", "²".encode("latin-1"))], b"", [])
@example("/echo", [(b"content-type", b"application/json\r\n\r\nx")], b"%ff=%00&&=", [b"{}"])
@example("/typed", [(b"content-type", b"multipart/form-data")], b"limit=\xff", [b"--"])
def test_random_headers_and_queries(
    path: str, headers: list[tuple[bytes, bytes]], query: bytes, chunks: list[bytes]
) -> None:
    _check(path, query, headers, chunks)
