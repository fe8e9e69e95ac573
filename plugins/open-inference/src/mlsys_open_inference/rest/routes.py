"""REST routes of inference: ``infer``, ``generate``, ``generate_stream``. The hot path: plain ASGI, no pydantic.

FastAPI's own routes would validate and document, at more than the cost of everything here; the codec validates.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import partial

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.binding import WireRequest
from mlsys_open_inference.engine import Answer, Engine
from mlsys_open_inference.number_arrays import check_values
from mlsys_open_inference.rest.codec import decode, encode, json_nbytes
from mlsys_open_inference.rest.compression import compressed, decompressed
from mlsys_open_inference.rest.connection import body_of, while_connected
from mlsys_open_inference.rest.generate import decode_generate, encode_generate
from mlsys_serving.http import ClosingStreamingResponse, HttpConfig
from mlsys_serving.http.json_body import parse_json
from mlsys_serving.http.threads import LARGE
from mlsys_serving.models.errors import UnsupportedError
from mlsys_serving.models.version import Version
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER_LENGTH = b"inference-header-content-length"


def inference_routes(engine: Engine, config: HttpConfig) -> list[Route]:
    """Return the routes, for models with and without a version in the path."""
    endpoints: dict[str, ASGIApp] = {
        "infer": _Infer(engine, config.max_body_nbytes),
        "generate": _Generate(engine, config.max_body_nbytes),
        "generate_stream": _GenerateStream(engine, config.max_body_nbytes),
    }
    return [
        _NamedRoute(f"/v2/models/{{model}}{version}/{verb}", endpoint, methods=["POST"])
        for version in ("", "/versions/{version}")
        for verb, endpoint in endpoints.items()
    ]


class _NamedRoute(Route):
    """A route that gives its template to metrics and logs, as FastAPI's routes do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


class _Endpoint:
    """Base of the three inference endpoints. An ASGI application, so that errors reach the app's own answers at once.

    Args:
        engine: runs inference.
        max_body_nbytes: of a body that was compressed; plain ones have been bounded before.
    """

    def __init__(self, engine: Engine, max_body_nbytes: int) -> None:
        self._engine = engine
        self._max_body_nbytes = max_body_nbytes

    def _version(self, scope: Scope) -> Version:
        parameters = scope["path_params"]
        return self._engine.repository.find(parameters["model"], parameters.get("version", ""))

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, header_nbytes: int | None) -> memoryview:
        """Return the body as it was before compression."""
        declared_nbytes = int(headers.get(b"content-length", b"0"))
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding in ("identity", ""):
            return await body_of(receive, declared_nbytes=declared_nbytes, header_nbytes=header_nbytes or 0)
        packed = await body_of(receive, declared_nbytes=declared_nbytes, header_nbytes=0)
        unpack = partial(decompressed, bytes(packed), encoding, max_nbytes=self._max_body_nbytes)
        return memoryview(await self._engine.threads.run(unpack, size=LARGE))  # a few bytes may become many

    async def _answers(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes]
    ) -> tuple[AsyncGenerator[Answer, None], Answer | None]:
        """Return the stream of a generate request and its first answer.

        Until the first answer an error still has its own status.
        """
        started_s = self._engine.now()
        version = self._version(scope)
        body = bytes(await self._body(headers, receive, None))
        wire = await self._engine.threads.run(_generate_request, body, version, size=len(body))
        deadline_s = scope["state"]["deadline"]
        answers = self._engine.stream(version, wire, started_s=started_s, deadline_s=deadline_s)
        return answers, await while_connected(scope, receive, anext(answers, None))

    async def _respond(
        self, send: Send, body: bytes, fields: list[tuple[bytes, bytes]], request_headers: dict[bytes, bytes]
    ) -> None:
        accepted = request_headers.get(b"accept-encoding")
        if accepted is not None:
            body, encoding = await self._engine.threads.run(
                compressed, body, accepted.decode("latin-1"), size=len(body)
            )
            if encoding is not None:
                fields.append((b"content-encoding", encoding.encode()))
        fields.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": body})


class _Infer(_Endpoint):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve ``POST /v2/models/{model}[/versions/{version}]/infer``."""
        started_s = self._engine.now()
        headers = dict(scope["headers"])
        version = self._version(scope)
        header_nbytes = _header_nbytes(headers)
        body = await self._body(headers, receive, header_nbytes)
        threads = self._engine.threads
        read = partial(decode, body, header_nbytes, version, self._engine.regions)
        rest = await threads.run(read, size=json_nbytes(body, header_nbytes))
        deadline_s = scope["state"]["deadline"]
        work = self._engine.infer(version, rest.wire, started_s=started_s, deadline_s=deadline_s)
        answer = await while_connected(scope, receive, work)
        content, header = await threads.run(encode, answer, rest, size=answer.nbytes)
        if header is None:
            fields = [(b"content-type", b"application/json")]
        else:
            fields = [(b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, b"%d" % header)]
        await self._respond(send, content, fields, headers)


class _Generate(_Endpoint):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve ``POST .../generate``: exactly one response."""
        headers = dict(scope["headers"])
        answers, first = await self._answers(scope, receive, headers)
        try:
            second = None if first is None else await while_connected(scope, receive, anext(answers, None))
        finally:
            await answers.aclose()
        if first is None or second is not None:
            given = "none" if first is None else "more"
            raise UnsupportedError(f"generate takes one response, the model gave {given}; use generate_stream")
        content = await self._engine.threads.run(_generate_answer, first, size=first.nbytes)
        await self._respond(send, content, [(b"content-type", b"application/json")], headers)


class _GenerateStream(_Endpoint):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve ``POST .../generate_stream``: server-sent events, one for each response."""
        answers, first = await self._answers(scope, receive, dict(scope["headers"]))

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                answer = first
                while answer is not None:
                    content = await self._engine.threads.run(_generate_answer, answer, size=answer.nbytes)
                    yield b"data: " + content + b"\n\n"
                    answer = await anext(answers, None)
            finally:
                await answers.aclose()

        await ClosingStreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)


def _header_nbytes(headers: dict[bytes, bytes]) -> int | None:
    header = headers.get(_HEADER_LENGTH)
    if header is None:
        return None
    if not (header.isdigit() and len(header) <= 18):
        raise InvalidInputError(
            f"Inference-Header-Content-Length is a number of bytes, got {header[:40].decode('latin-1')!r}"
        )
    return int(header)


def _generate_request(body: bytes, version: Version) -> WireRequest:
    check_values(body)
    wire = decode_generate(parse_json(body), version)
    wire.size = len(body)
    return wire


def _generate_answer(answer: Answer) -> bytes:
    value = encode_generate(answer)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
