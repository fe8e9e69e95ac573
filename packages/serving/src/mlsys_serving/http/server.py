"""Serve an app of ``create_app`` with uvicorn, in the main thread with signals or in a background thread.

uvicorn stops listening at the first signal. Here the server keeps answering while it drains: a load balancer sees
``/health/ready`` turn 503, late requests are refused with a retry hint, running ones finish. Then uvicorn's own
shutdown runs, with nothing left to wait for.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from mlsys_core.collector import collecting_beside_requests
from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from uvicorn.config import STARTUP_FAILURE

from mlsys_serving.http.config import within_open_files
from mlsys_serving.http.port import BoundPort, uvicorn_config
from mlsys_serving.http.protocol import Connection
from mlsys_serving.http.record import forwarded_uvicorn_log
from mlsys_serving.http.runtime import HttpRuntime, runtime_of
from mlsys_serving.http.sockets import ServerAddress

__all__ = ["BackgroundServer", "ServerAddress", "serve"]

EXIT_CLEAN, EXIT_CUT = 0, 1
_FORCED_EXIT_S = 2.0  # "at once" for a process that hangs


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    bound: BoundPort | None = None,
    on_ready: Callable[[ServerAddress], None] | None = None,
) -> int:
    """Serve ``app`` until SIGTERM or SIGINT, then drain.

    While the app starts, and before where ``bound`` is given, every request is answered 503 ``loading``.

    At the first signal ``/health/ready`` turns 503, new requests get 503 with ``Retry-After`` and
    ``Connection: close``, and running ones, streams too, go on for at most ``config.drain_timeout_s``; the rest is
    cut. A second signal ends the process at once, and so does the first while the app still starts.

    Args:
        app: made by ``create_app``.
        host: an address of this machine.
        port: 0 takes a free one.
        bound: a port that was taken before, in place of host and port; the caller closes it.
        on_ready: called with the bound address when requests are taken.

    Returns:
        The exit code for the process: 0 after a clean drain, 1 if requests were cut, 128 + the signal's number if it
        ended at once.

    Raises:
        InvalidInputError: a bad host or port, another app, or not in the main thread.
        ServingError: the port is in use, or the app failed to start.
    """
    runtime = runtime_of(app)
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInputError(
            "serve() takes signals, so it runs in the main thread only; use BackgroundServer elsewhere"
        )
    if bound is None:
        with BoundPort(host, port, config=runtime.config, error_format=runtime.answers.error_format) as bound:
            return serve(app, bound=bound, on_ready=on_ready)
    with ExitStack() as serving:

        def ready(address: ServerAddress) -> None:
            serving.enter_context(collecting_beside_requests())
            if on_ready is not None:
                on_ready(address)

        server = _Server(app, runtime, bound, ready)
        # uvicorn logs a traceback when a signal interrupts its start: no news.
        serving.enter_context(
            forwarded_uvicorn_log(
                runtime.logger,
                is_wanted=lambda: (server.started or not server.should_exit) and not _is_refused(runtime),
            )
        )
        _run(server)
    return server.exit_code


class BackgroundServer:
    """Serves an app in a thread, for tests, demos and notebooks; a context manager.

    Args:
        app: made by ``create_app``.
        host: an address of this machine.
        port: 0 takes a free one.
        drain_timeout_s: how long running requests may go on at the end; None: as the app's config says.

    Raises:
        InvalidInputError: a bad host or port, or another app.
        ServingError: the port is in use, or the app failed to start.

    Example:
        >>> from mlsys_serving.http import HttpConfig, create_app
        >>> import httpx
        >>> with BackgroundServer(create_app(HttpConfig())) as server:
        ...     httpx.get(server.url + "/health/ready").json()["status"]
        'ready'
    """

    def __init__(
        self, app: FastAPI, host: str = "127.0.0.1", port: int = 0, *, drain_timeout_s: float | None = None
    ) -> None:
        self._runtime = runtime_of(app)
        self._app = app
        self._host, self._port = host, port
        self._drain_timeout_s = drain_timeout_s
        self._is_up_or_failed = threading.Event()
        self._error: BaseException | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._address: ServerAddress | None = None

    @property
    def address(self) -> ServerAddress:
        """Address that the server listens on.

        Raises:
            ServingError: it has not been started.
        """
        if self._address is None:
            raise ServingError("this server has not been started; use it as a context manager, or call start()")
        return self._address

    @property
    def url(self) -> str:
        """Base URL, such as ``http://127.0.0.1:41234``."""
        return self.address.url

    def start(self) -> BackgroundServer:
        """Listen, and return when requests are taken. A server starts once."""
        if self._thread is not None:
            raise ServingError("this server has been started before; make a new one")
        bound = BoundPort(
            self._host,
            self._port,
            config=self._runtime.config,
            error_format=self._runtime.answers.error_format,
            answers=False,  # start() returns when the app takes requests
        )
        self._address = bound.address
        server = self._server = _Server(
            self._app,
            self._runtime,
            bound,
            lambda _: self._is_up_or_failed.set(),
            drain_timeout_s=self._drain_timeout_s,
        )
        self._thread = threading.Thread(target=self._main, args=(server, bound), name="mlsys-http", daemon=True)
        self._thread.start()
        self._is_up_or_failed.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def stop(self) -> None:
        """Drain and wait for the thread's end; idempotent."""
        if self._server is None or self._thread is None:
            return
        self._server.begin_drain_threadsafe()
        self._thread.join()

    def _main(self, server: _Server, bound: BoundPort) -> None:
        try:
            with bound, forwarded_uvicorn_log(self._runtime.logger, is_wanted=lambda: not _is_refused(self._runtime)):
                _run(server)
        except BaseException as error:  # noqa: BLE001  (raised by start(), in the caller's thread)
            self._error = error
        finally:
            self._is_up_or_failed.set()

    def __enter__(self) -> BackgroundServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_refused(runtime: HttpRuntime) -> bool:
    """Return whether the app failed to start for a reason that is told in one line, without a traceback."""
    return isinstance(runtime.lifecycle.startup_error, MlsysError)


def _run(server: _Server) -> None:
    """Run ``server`` to its end, in an event loop of its own."""
    try:
        server.run()
    except asyncio.CancelledError:  # a signal while the app started
        if server.exit_code == EXIT_CLEAN:
            raise
    except SystemExit as error:  # uvicorn's way to say that the app's lifespan failed
        cause = server.runtime.lifecycle.startup_error
        if isinstance(cause, MlsysError):
            raise cause from None
        raise ServingError(f"the app failed to start: {cause or 'see the log'}") from (cause or error)


class _Server(uvicorn.Server):
    """A uvicorn server that drains before its shutdown."""

    def __init__(
        self,
        app: FastAPI,
        runtime: HttpRuntime,
        bound: BoundPort,
        on_ready: Callable[[ServerAddress], None] | None,
        *,
        drain_timeout_s: float | None = None,
    ) -> None:
        super().__init__(uvicorn_config(app, runtime.config, lifespan="on"))
        self.runtime = runtime
        self.exit_code = EXIT_CLEAN
        self._bound = bound
        self._on_ready = on_ready
        self._drain_timeout_s = runtime.config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then listen. Replaces uvicorn's, whose connections cannot be bounded."""
        self._loop, self._main_task = asyncio.get_running_loop(), asyncio.current_task()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        self.runtime.guard.listens_on(self._bound.address)
        limits = within_open_files(self.runtime.config.connections)

        state, app_state = self.server_state, self.lifespan.state
        connection = partial(Connection, limits, config=self.config, server_state=state, app_state=app_state)
        self.servers = [await self._bound.hand_over(connection)]
        self.started = True
        if self._on_ready is not None:
            self._on_ready(self._bound.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain, then leave by force. uvicorn's own handler would stop listening."""
        self._num_signals += 1
        if self._num_signals == 1 and self.started:
            self.begin_drain_threadsafe()
            return
        self.exit_code = 128 + sig
        self.should_exit = self.force_exit = True
        if not self.started and self._loop is not None and self._main_task is not None:
            self.runtime.logger.info("stopped while starting", signal=sig)
            self._loop.call_soon_threadsafe(self._main_task.cancel)  # the app's lifespan is cancelled, and cleans up
        # Nothing that hangs, neither a lifespan nor a worker thread, outlives this.
        timer = threading.Timer(_FORCED_EXIT_S, os._exit, [self.exit_code])
        timer.daemon = True
        timer.start()

    def begin_drain_threadsafe(self) -> None:
        """Start the drain, from any thread or from a signal handler."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        started_at = asyncio.get_running_loop().time()
        self.runtime.logger.info("draining", running=self.runtime.lifecycle.num_running)
        is_clean = await self.runtime.lifecycle.drain(self._drain_timeout_s)
        if not is_clean:
            self.exit_code = EXIT_CUT
        left_s = self._drain_timeout_s - (asyncio.get_running_loop().time() - started_at)
        # uvicorn still waits for clients that read the end of their response slowly.
        self.config.timeout_graceful_shutdown = max(1, math.ceil(left_s))
        self.runtime.logger.info("drained", clean=is_clean)
        self.should_exit = True
