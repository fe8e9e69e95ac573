"""Write errors in the app's format; the exception handlers and every middleware answer through this."""

from __future__ import annotations

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
        validation_status: 400 or 422, for requests that do not fit their schema.
    """

    def __init__(self, error_format: ErrorFormat, *, validation_status: int) -> None:
        self.error_format = error_format
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
        body = to_json(self.error_format.body(info))
        return Response(body, status_code=info.status, headers=headers, media_type="application/json")

    def stream_event(self, info: ErrorInfo, content_type: str) -> bytes | None:
        """Return the last event of a broken stream of ``content_type``; None if such a stream can only be cut."""
        return self.error_format.event(self.error_format.body(info), content_type)

    async def refuse(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or close a WebSocket before it is accepted."""
        info = self.info(error, scope)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            code = _WS_TRY_AGAIN_LATER if info.status == 503 else _WS_POLICY_VIOLATION
            await send({"type": "websocket.close", "code": code, "reason": info.code})
            return
        await self.response(info)(scope, receive, send)
