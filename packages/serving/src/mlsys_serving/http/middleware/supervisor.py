"""Run each request so that it can be stopped, and make it end in a documented way.

Three things end a request early: its deadline, the end of a drain, and an exception nobody handled. If the response has
not started the client gets it as an error response; else the stream ends with an error event, or is cut if its type has
none. A client that left ends it silently.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
