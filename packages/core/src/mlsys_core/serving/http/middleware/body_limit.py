"""Bounds what a request may upload."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_core.serving.http.errors import HttpError


class BodyLimitMiddleware:
    """Raises 413 for a body over the limit: at once if ``Content-Length`` says so, else when it has grown over it.

    Stands inside the supervisor, which answers. The connection is closed with the answer, so that nobody has to read
    the rest of the body.

    Args:
        app: the next ASGI app.
        max_body_nbytes: the largest body that passes.
    """

    def __init__(self, app: ASGIApp, *, max_body_nbytes: int) -> None:
        self._app = app
        self._max_body_nbytes = max_body_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        # More than 18 digits is too much whatever the limit; int() refuses thousands of them.
        if (
            declared.isascii()
            and declared.isdecimal()
            and (len(declared) > 18 or int(declared) > self._max_body_nbytes)
        ):
            raise self._too_large()
        received_nbytes = 0

        async def limited() -> Message:
            nonlocal received_nbytes
            message = await receive()
            received_nbytes += len(message.get("body", b""))
            if received_nbytes > self._max_body_nbytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> HttpError:
        return HttpError(
            f"the request's body is larger than {self._max_body_nbytes} bytes, the most this server takes",
            http_status=413,
            headers={"Connection": "close"},
        )
