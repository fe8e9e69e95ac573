"""Write errors in the app's format; the exception handlers and every middleware answer through this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlsys_serving.http.describe import describe
from mlsys_serving.http.errors import ErrorFormat, ErrorInfo, to_json
from mlsys_serving.http.record import request_id_of

_WS_TRY_AGAIN_LATER, _WS_POLICY_VIOLATION = 1013, 1008


class ErrorAnswers:
    """Writer of one app's error answers.

    Args:
        error_format: format of a body.
        by_path: formats of other protocols' routes, by prefix of their paths; the longest counts.
        validation_status: 400 or 422, for requests that do not fit their schema.
    """

    def __init__(
        self, error_format: ErrorFormat, *, validation_status: int, by_path: Mapping[str, ErrorFormat] | None = None
    ) -> None:
        self.error_format = error_format
        self._by_path = sorted((by_path or {}).items(), key=lambda each: -len(each[0]))
        self._validation_status = validation_status

    def info(self, error: BaseException, scope: Scope) -> ErrorInfo:
        """Return the part of ``error`` that the client of ``scope`` may see."""
        info = describe(error, validation_status=self._validation_status)
        return replace(info, request_id=request_id_of(scope), path=scope.get("path", ""))

    def response(self, info: ErrorInfo) -> Response:
        """Return the response that carries ``info``."""
        headers = dict(info.headers)
        if info.status < 400:  # an HTTPException used as a redirect or as 304: it has no body
            return Response(status_code=info.status, headers=headers)
        body = to_json(self._format(info).body(info))
        return Response(body, status_code=info.status, headers=headers, media_type="application/json")

    def stream_event(self, info: ErrorInfo, content_type: str) -> bytes | None:
        """Return the last event of a broken stream of ``content_type``; None if such a stream can only be cut."""
        own = self._format(info)
        return own.event(own.body(info), content_type)

    def _format(self, info: ErrorInfo) -> ErrorFormat:
        return next((own for prefix, own in self._by_path if info.path.startswith(prefix)), self.error_format)

    async def refuse(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or close a WebSocket before it is accepted."""
        info = self.info(error, scope)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            code = _WS_TRY_AGAIN_LATER if info.status == 503 else _WS_POLICY_VIOLATION
            await send({"type": "websocket.close", "code": code, "reason": info.code})
            return
        await self.response(info)(scope, receive, send)
