"""Bound the upload of each request, and of all requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.threads import LARGE

MAX_WAITING_BODIES = 512  # large bodies that wait for room; one more is refused
_TRIMMED = 1024 * 1024  # bytes of large bodies from which on freed memory is given back to the system afterwards


class BodyBudget:
    """A number of bytes that large bodies share. Bodies wait for room in order, unread; small ones always have room.

    Belongs to the event loop's thread.

    Args:
        max_nbytes: sum of all large bodies in work; a larger one is admitted alone.
        on_idle: called when no large body is left, and those that were had a megabyte or more together.

    Example:
        >>> async def main():
        ...     async with BodyBudget(1 << 20).admitted(300_000):
        ...         return "read the body"
        >>> asyncio.run(main())
        'read the body'
    """

    def __init__(self, max_nbytes: int, *, on_idle: Callable[[], None] = lambda: None) -> None:
        self._max_nbytes = max_nbytes
        self._on_idle = on_idle
        self._held_nbytes = 0
        self._left_nbytes = 0  # of bodies that have left since the last call of on_idle
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_nbytes(self) -> int:
        """Bytes that are taken now."""
        return self._held_nbytes

    @asynccontextmanager
    async def admitted(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` for a body while its request is in work.

        Raises:
            HttpError: 503, too many others wait.
        """
        if nbytes < LARGE:
            yield
            return
        held = min(nbytes, self._max_nbytes)
        await self._acquire(held)
        try:
            yield
        finally:
            self._release(held)
            self._left_nbytes += nbytes
            if self._left_nbytes >= _TRIMMED and not self._held_nbytes:
                self._left_nbytes = 0
                # After this turn of the loop, when nothing refers to the body any more.
                asyncio.get_running_loop().call_soon(self._on_idle)

    async def _acquire(self, nbytes: int) -> None:
        if not self._waiting and self._held_nbytes + nbytes <= self._max_nbytes:
            self._held_nbytes += nbytes
            return
        if len(self._waiting) >= MAX_WAITING_BODIES:
            raise HttpError(
                f"the {self._max_nbytes} bytes that all requests' bodies may have together are taken, and "
                f"{MAX_WAITING_BODIES} requests wait: try again, or send less than {LARGE} bytes",
                http_status=503,
                error_code="too_many_large_requests",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # admitted, and cancelled in the same turn of the loop
                self._release(nbytes)
            else:
                self._waiting.remove((nbytes, turn))
                self._admit_waiting()
            raise

    def _release(self, nbytes: int) -> None:
        self._held_nbytes -= nbytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._held_nbytes + self._waiting[0][0] <= self._max_nbytes:
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._held_nbytes += nbytes
                turn.set_result(None)


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
