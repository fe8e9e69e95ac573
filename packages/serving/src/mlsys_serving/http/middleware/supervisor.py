"""Run each request so that it can be stopped, bound its upload, and make it end in a documented way.

Three things end a request early: its deadline, the end of a drain, and an exception nobody handled. If the response has
not started the client gets it as an error response; else the stream ends with an error event, or is cut if its type has
none. A client that left ends it silently.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import structlog
from mlsys_core.errors import MlsysError
from mlsys_core.plugins.registry import one_line
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_serving.http.config import HttpConfig, is_duration
from mlsys_serving.http.describe import ErrorAnswers, unwrap
from mlsys_serving.http.errors import ClientDisconnectedError, HttpError
from mlsys_serving.http.lifecycle import Lifecycle
from mlsys_serving.http.record import log_failure, record_of
from mlsys_serving.http.streaming import LARGE

Blamed: TypeAlias = Callable[[BaseException, Any], "str | None"]  # error and endpoint -> the plugin's part to blame

_FAILED_SOCKET = 1011  # close code of WebSockets: an unexpected condition in the server
_LAST_EVENT_TIMEOUT_S = 1.0  # a client that has stopped reading does not get its last event


class SupervisorMiddleware:
    """Enforces deadlines and cuts, and answers unhandled exceptions.

    Sets ``request.state.deadline``: seconds of the app's clock, or None.

    Args:
        app: the next ASGI app.
        config: the default deadline and its cap.
        lifecycle: list of running requests; stops them at the end of a drain.
        answers: writes error responses and events.
        logger: gets exceptions, with their traceback if they are not an extension's.
        blamed: tells the extension whose mistake an exception is; None: no extension's.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: HttpConfig,
        lifecycle: Lifecycle,
        answers: ErrorAnswers,
        logger: structlog.typing.FilteringBoundLogger,
        blamed: Blamed,
    ) -> None:
        self._app = app
        self._blamed = blamed
        self._config = config
        self._lifecycle = lifecycle
        self._answers = answers
        self._logger = logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        try:
            timeout_s = chosen_timeout_s(Headers(scope=scope).get("x-request-timeout-s"), self._config)
        except HttpError as error:
            await self._answers.refuse(error, scope, receive, send)
            return
        received_at = record_of(scope).received_at
        scope["state"]["deadline"] = None if timeout_s is None else received_at + timeout_s
        run = _Run(self._app, scope, receive, send)
        with self._lifecycle.running(run), _deadline(run, timeout_s):
            error_or_none = await run.outcome()
            if error_or_none is not None:
                await self._conclude(run, error_or_none, scope, receive, send)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _call(self._app, scope, receive, send)
        except Exception as error:
            if (blamed := self._blamed(error, scope.get("endpoint"))) is None:
                raise
            log_failure(self._logger, "socket failed", error, blamed)
            with suppress(Exception):  # closed already
                await send({"type": "websocket.close", "code": _FAILED_SOCKET, "reason": f"{blamed} failed"})

    async def _conclude(self, run: _Run, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        if isinstance(error, ClientDisconnectedError):
            return
        info = self._answers.info(error, scope)
        if info.status >= 500 and not run.was_stopped and not _is_refusal(error, info.status):
            blamed = self._blamed(error, scope.get("endpoint"))
            log_failure(self._logger, "request failed", error, blamed, request_id=record.request_id)
            if blamed is not None and info.code == "internal_error":
                info = replace(info, message=info.message.replace("the server", blamed, 1))
        if record.status is None:
            # Before the application has cleaned up: a worker thread that cannot be cancelled does not hold the answer.
            await self._answers.response(info)(scope, receive, send)
        cleanup_error = await run.cleaned_up()
        if cleanup_error is not None:
            blamed = self._blamed(cleanup_error, scope.get("endpoint"))
            log_failure(self._logger, "clean-up failed", cleanup_error, blamed, request_id=record.request_id)
        event = None if record.has_length else self._answers.stream_event(info, record.content_type)
        if record.is_complete or record.disconnected.is_set() or event is None:
            return  # an incomplete response: the server closes the connection, so that the client sees it was cut
        try:
            async with asyncio.timeout(_LAST_EVENT_TIMEOUT_S):
                await send({"type": "http.response.body", "body": event, "more_body": False})
        except TimeoutError:
            return


def chosen_timeout_s(header: str | None, config: HttpConfig) -> float | None:
    """Return the deadline of a request, in seconds from its receipt; None: it has none.

    Args:
        header: ``X-Request-Timeout-S``, if the client sent it.
        config: the default, and the cap on a client's own deadline.

    Raises:
        HttpError: 400, the header is not a number above 0.

    Example:
        >>> chosen_timeout_s("90", HttpConfig(request_timeout_s=10, max_request_timeout_s=60))
        60
    """
    if header is None:
        return config.request_timeout_s
    try:
        asked_s = float(header)
    except ValueError:
        asked_s = math.nan
    if not is_duration(asked_s):
        raise HttpError(
            f"X-Request-Timeout-S is a finite number of seconds above 0, got {header[:40]!r}",
            http_status=400,
            error_code="invalid_timeout",
            param="X-Request-Timeout-S",
        )
    return asked_s if config.timeout_cap_s is None else min(asked_s, config.timeout_cap_s)


class _Run:
    """One call of the application, in a task of its own, that can be stopped from outside."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._send = send
        self._stop_error: MlsysError | None = None
        self._end: asyncio.Future[None] = loop.create_future()  # of the call, or its stop: whichever is first
        self._task = loop.create_task(_call(app, scope, receive, self._guarded_send))
        self._task.add_done_callback(self._note_end)

    @property
    def was_stopped(self) -> bool:
        return self._stop_error is not None

    def stop(self, error: MlsysError) -> None:
        """End the call with ``error``, unless it has ended or been stopped already."""
        if not self._task.done() and self._stop_error is None:
            self._stop_error = error
            self._task.cancel()
            self._note_end()

    async def outcome(self) -> BaseException | None:
        """Wait for the end or the stop, whichever is first; return the error for the client, or None on success."""
        try:
            await self._end
        except asyncio.CancelledError:  # the server gives this request up
            self._task.cancel()
            await self.cleaned_up()
            raise
        if self._stop_error is not None:
            return self._stop_error
        if self._task.cancelled():
            return RuntimeError("the application cancelled its own request")
        error = self._task.exception()
        return None if error is None else unwrap(error)

    def _note_end(self, _: object = None) -> None:
        if not self._end.done():
            self._end.set_result(None)

    async def cleaned_up(self) -> BaseException | None:
        """Wait until a stopped call has cleaned up; return the other error that it raised, if any."""
        await asyncio.wait({self._task})
        if not self.was_stopped or self._task.cancelled():
            return None
        error = self._task.exception()
        return None if error is self._stop_error else error

    async def _guarded_send(self, message: Message) -> None:
        if self._stop_error is not None:
            raise self._stop_error  # an application that ignored its cancellation
        await self._send(message)


def _is_refusal(error: BaseException, status: int) -> bool:
    """Return whether the server only refused (not offered, no room, too late): no failure to trace."""
    return isinstance(error, MlsysError) and status in (501, 503, 504)


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        message = "the application cancelled its own request"
        raise RuntimeError(message).with_traceback(error.__traceback__) from None
    except (SystemExit, KeyboardInterrupt) as error:  # out of a task they would end the event loop, and so the server
        raise RuntimeError(one_line(error)).with_traceback(error.__traceback__) from None


@contextmanager
def _deadline(run: _Run, timeout_s: float | None) -> Iterator[None]:
    if timeout_s is None:
        yield
        return
    error = HttpError(f"the request's deadline of {timeout_s:g} s has passed", http_status=504)
    timer = asyncio.get_running_loop().call_later(timeout_s, run.stop, error)
    try:
        yield
    finally:
        timer.cancel()


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
