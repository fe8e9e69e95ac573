"""REST routes of inference: ``infer``, ``generate``, ``generate_stream``. The hot path: plain Starlette routes.

FastAPI's own would validate and document, at about the cost of everything else here; the codec validates.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.http import ClosingStreamingResponse, HttpConfig
from mlsys_core.serving.http.json_body import parse_json
from mlsys_core.serving.oip.compression import compressed, decompressed
from mlsys_core.serving.oip.connection import body_of, while_connected
from mlsys_core.serving.oip.engine import Answer, Engine
from mlsys_core.serving.oip.errors import UnsupportedError
from mlsys_core.serving.oip.generate import decode_generate, encode_generate
from mlsys_core.serving.oip.rest_codec import decode, encode
from mlsys_core.serving.oip.version import Version

_HEADER_LENGTH = "inference-header-content-length"


def inference_routes(engine: Engine, config: HttpConfig) -> list[Route]:
    """The routes, for models with and without a version in the path."""
    front = _Inference(engine, config)
    return [
        _NamedRoute(f"/v2/models/{{model}}{version}/{verb}", endpoint, methods=["POST"])
        for version in ("", "/versions/{version}")
        for verb, endpoint in (
            ("infer", front.infer),
            ("generate", front.generate),
            ("generate_stream", front.generate_stream),
        )
    ]


class _NamedRoute(Route):
    """Tells its template to metrics and logs, as FastAPI's routes do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


class _Inference:
    def __init__(self, engine: Engine, config: HttpConfig) -> None:
        self._engine = engine
        self._max_body_nbytes = config.max_body_nbytes

    async def infer(self, request: Request) -> Response:
        """``POST /v2/models/{model}[/versions/{version}]/infer``."""
        started_s = self._engine.now()
        version = self._version(request)
        header_nbytes = _header_nbytes(request)
        rest = decode(await self._body(request, header_nbytes), header_nbytes)
        work = self._engine.infer(version, rest.wire, started_s=started_s, deadline_s=request.state.deadline)
        answer = await while_connected(request, work)
        body, json_nbytes = encode(answer, rest)
        headers = {} if json_nbytes is None else {_HEADER_LENGTH: str(json_nbytes)}
        media_type = "application/json" if json_nbytes is None else "application/octet-stream"
        return _response(request, body, media_type, headers)

    async def generate(self, request: Request) -> Response:
        """``POST .../generate``: exactly one response."""
        answers, first = await self._answers(request)
        try:
            second = None if first is None else await while_connected(request, anext(answers, None))
        finally:
            await answers.aclose()
        if first is None or second is not None:
            given = "none" if first is None else "more"
            raise UnsupportedError(f"generate takes one response, the model gave {given}; use generate_stream")
        return _response(request, _json(encode_generate(first)), "application/json", {})

    async def generate_stream(self, request: Request) -> Response:
        """``POST .../generate_stream``: server-sent events, one for each response."""
        answers, first = await self._answers(request)

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                answer = first
                while answer is not None:
                    yield b"data: " + _json(encode_generate(answer)) + b"\n\n"
                    answer = await anext(answers, None)
            finally:
                await answers.aclose()

        return ClosingStreamingResponse(events(), media_type="text/event-stream")

    async def _answers(self, request: Request) -> tuple[AsyncGenerator[Answer, None], Answer | None]:
        """The stream and its first answer: until then an error still has its own status."""
        started_s = self._engine.now()
        version = self._version(request)
        wire = decode_generate(parse_json(bytes(await self._body(request, None))), version)
        answers = self._engine.stream(version, wire, started_s=started_s, deadline_s=request.state.deadline)
        return answers, await while_connected(request, anext(answers, None))

    def _version(self, request: Request) -> Version:
        parameters = request.path_params
        return self._engine.repository.find(parameters["model"], parameters.get("version", ""))

    async def _body(self, request: Request, header_nbytes: int | None) -> memoryview:
        """The body as it was before compression; its binary part aligned, so that arrays can be views of it."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            return await body_of(request, header_nbytes)
        packed = bytes(await body_of(request, None))
        return memoryview(decompressed(packed, encoding, max_nbytes=self._max_body_nbytes))


def _header_nbytes(request: Request) -> int | None:
    header = request.headers.get(_HEADER_LENGTH)
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) <= 18):
        raise InvalidInputError(f"Inference-Header-Content-Length is a number of bytes, got {header[:40]!r}")
    return int(header)


def _response(request: Request, body: bytes, media_type: str, headers: dict[str, str]) -> Response:
    accepted = request.headers.get("accept-encoding")
    if accepted is not None:
        body, encoding = compressed(body, accepted)
        if encoding is not None:
            headers["content-encoding"] = encoding
    return Response(body, media_type=media_type, headers=headers)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
