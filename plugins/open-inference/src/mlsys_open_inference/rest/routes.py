"""The REST route of inference, with bodies compressed by gzip or deflate. The hot path: plain ASGI, no pydantic.

FastAPI's own routes would validate and document, at more than the cost of everything here; the codec validates.
"""

from __future__ import annotations

import gzip
import zlib
from functools import partial

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.engine import Engine
from mlsys_open_inference.rest.codec import decode, encode, json_nbytes
from mlsys_open_inference.rest.connection import body_of, while_connected
from mlsys_serving.http import HttpConfig, HttpError
from mlsys_serving.http.streaming import LARGE
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

_HEADER_LENGTH = b"inference-header-content-length"
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_MIN_NBYTES = 1024  # a smaller response gains nothing


def inference_routes(engine: Engine, config: HttpConfig) -> list[Route]:
    """Return the routes, for models with and without a version in the path."""
    infer = _Infer(engine, config.max_body_nbytes)
    return [
        _NamedRoute(f"/v2/models/{{model}}{version}/infer", infer, methods=["POST"])
        for version in ("", "/versions/{version}")
    ]


class _NamedRoute(Route):
    """A route that gives its template to metrics and logs, as FastAPI's routes do."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


class _Infer:
    """The endpoint: an ASGI application, so that errors reach the app's own answers at once.

    Args:
        engine: runs inference.
        max_body_nbytes: of a body that was compressed; plain ones have been bounded before.
    """

    def __init__(self, engine: Engine, max_body_nbytes: int) -> None:
        self._engine = engine
        self._max_body_nbytes = max_body_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve ``POST /v2/models/{model}[/versions/{version}]/infer``."""
        started_s = self._engine.now()
        headers = dict(scope["headers"])
        parameters = scope["path_params"]
        version = self._engine.repository.find(parameters["model"], parameters.get("version", ""))
        header_nbytes = _header_nbytes(headers)
        body = await self._body(headers, receive, header_nbytes)
        threads = self._engine.threads
        read = partial(decode, body, header_nbytes, version)
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

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, header_nbytes: int | None) -> memoryview:
        """Return the body as it was before compression."""
        declared_nbytes = int(headers.get(b"content-length", b"0"))
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding in ("identity", ""):
            return await body_of(receive, declared_nbytes=declared_nbytes, header_nbytes=header_nbytes or 0)
        packed = await body_of(receive, declared_nbytes=declared_nbytes, header_nbytes=0)
        unpack = partial(decompressed, bytes(packed), encoding, max_nbytes=self._max_body_nbytes)
        return memoryview(await self._engine.threads.run(unpack, size=LARGE))  # a few bytes may become many

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


def _header_nbytes(headers: dict[bytes, bytes]) -> int | None:
    header = headers.get(_HEADER_LENGTH)
    if header is None:
        return None
    if not (header.isdigit() and len(header) <= 18):
        raise InvalidInputError(
            f"Inference-Header-Content-Length is a number of bytes, got {header[:40].decode('latin-1')!r}"
        )
    return int(header)


def decompressed(body: bytes, encoding: str, *, max_nbytes: int) -> bytes:
    """Return ``body`` as it was before compression.

    Raises:
        HttpError: 415, another encoding than gzip and deflate; 413, it is larger than ``max_nbytes``.
        InvalidInputError: it is damaged.

    Example:
        >>> decompressed(zlib.compress(b"hello"), "deflate", max_nbytes=5)
        b'hello'
    """
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None:
        raise HttpError(f"content-encoding is gzip or deflate, got {encoding[:40]!r}", http_status=415)
    stream = zlib.decompressobj(window_bits)
    try:
        plain = stream.decompress(body, max_nbytes + 1)
    except zlib.error as error:
        raise InvalidInputError(f"the body is no {encoding}: {error}") from error
    if len(plain) > max_nbytes:
        raise HttpError(
            f"the request's body is larger than {max_nbytes} bytes, the most this server takes", http_status=413
        )
    if not stream.eof or stream.unused_data:
        raise InvalidInputError(f"the body's {encoding} data is cut off, or something follows it")
    return plain


def compressed(body: bytes, accept_encoding: str) -> tuple[bytes, str | None]:
    """Return ``body``, compressed if the client takes it and it gets smaller, and the encoding.

    Example:
        >>> compressed(b"x" * 4096, "deflate, gzip;q=0")[1], compressed(b"x", "gzip")[1]
        ('deflate', None)
    """
    if len(body) < _MIN_NBYTES:
        return body, None
    for choice in accept_encoding.lower().split(","):
        encoding, _, quality = choice.strip().partition(";")
        if encoding.strip() in _WINDOW_BITS and quality.replace(" ", "") not in ("q=0", "q=0.0"):
            encoding = encoding.strip()
            smaller = gzip.compress(body, 1, mtime=0) if encoding == "gzip" else zlib.compress(body, 1)
            return (smaller, encoding) if len(smaller) < len(body) else (body, None)
    return body, None
