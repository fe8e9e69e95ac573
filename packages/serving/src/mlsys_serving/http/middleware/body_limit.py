"""Bound the upload of each request, and of all requests together."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_serving.http.body_budget import BodyBudget
from mlsys_serving.http.errors import HttpError


class BodyLimitMiddleware:
    """Raises 413 for a body over the limit: at once if ``Content-Length`` says so, else when it has grown over it.

    A large body is not read before the budget of all bodies has room for it, and holds that room until its request is
    answered. Stands inside the supervisor, which answers. After 413 the connection is closed, so that nobody has to
    read the rest of the body.

    Args:
        app: the next ASGI app.
        max_body_nbytes: the largest body that passes.
        budget: of all bodies together.
        uploads: the largest body by path, where it goes to the disk as it comes and takes no part of the budget.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_nbytes: int, budget: BodyBudget, uploads: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._uploads = uploads or {}
        self._max_body_nbytes = max_body_nbytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload_nbytes = self._uploads.get(scope["path"]) if scope["method"] == "POST" else None
        limit_nbytes = self._max_body_nbytes if upload_nbytes is None else upload_nbytes
        received_nbytes = 0

        async def limited() -> Message:
            nonlocal received_nbytes
            message = await receive()
            received_nbytes += len(message.get("body", b""))
            if received_nbytes > limit_nbytes:
                raise body_too_large(limit_nbytes)
            return message

        expected_nbytes = _expected_nbytes(Headers(scope=scope), limit_nbytes)
        async with self._budget.admitted(expected_nbytes if upload_nbytes is None else 0):
            await self._app(scope, limited, send)


def _expected_nbytes(headers: Headers, limit_nbytes: int) -> int:
    """Return the largest possible size of the body.

    Raises:
        HttpError: 413, larger than allowed.
    """
    declared = headers.get("content-length", "")
    # A proxy or a test may declare nonsense, which is not ours to judge: what arrives is counted anyway.
    if not (declared.isascii() and declared.isdecimal()):
        return limit_nbytes if declared or "transfer-encoding" in headers else 0
    # More than 18 digits is too much whatever the limit; int() refuses thousands of them.
    if len(declared) > 18 or int(declared) > limit_nbytes:
        raise body_too_large(limit_nbytes)
    return int(declared)


def body_too_large(max_nbytes: int) -> HttpError:
    """Return the error 413."""
    return HttpError(
        f"the request's body is larger than {max_nbytes} bytes, the most this server takes",
        http_status=413,
        headers={"Connection": "close"},
    )
