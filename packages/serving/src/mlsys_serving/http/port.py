"""A port taken before the app exists: a busy one is refused early, and early clients get an answer.

From :class:`BoundPort`'s start until the server takes it over, a thread answers: liveness 200, all else
503 ``loading``. Connections that come in the moment between wait in the system's queue.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from mlsys_serving.http.config import HttpConfig
from mlsys_serving.http.errors import ErrorFormat, ErrorInfo, to_json
from mlsys_serving.http.protocol import Connection
from mlsys_serving.http.sockets import listen

_RETRY_AFTER_S = 2
_LOOK_S = 0.01  # between two looks if the last connections of the loading phase are gone
_HEALTH: dict[str, tuple[int, dict[str, object]]] = {
    "/health/live": (200, {"status": "live"}),
    "/health/ready": (503, {"status": "starting", "checks": {}}),
    "/v2/health/live": (200, {"live": True}),
    "/v2/health/ready": (503, {"ready": False}),
}


class BoundPort:
    """A listening port; a context manager, which closes it.

    Args:
        host: an address of this machine.
        port: 0 takes a free one.
        config: settings of the later app: certificate and bounds hold from the start.
        error_format: that of the later app.
        answers: start the thread that answers; without it connections wait, until :meth:`answer`.

    Raises:
        InvalidInputError: a bad host or port, or a certificate that cannot be used.
        ServingError: the port is in use, or needs privileges.

    Example:
        >>> import httpx
        >>> with BoundPort("127.0.0.1", 0, config=HttpConfig()) as bound:
        ...     httpx.get(bound.address.url + "/v1/models").json()["error"]["code"]
        'loading'
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        config: HttpConfig,
        error_format: ErrorFormat | None = None,
        answers: bool = True,
    ) -> None:
        self._ssl = None
        if config.tls is not None:
            from mlsys_serving.http.tls import server_context

            self._ssl = server_context(config.tls)
        self._config = config
        self._listener, self.address = listen(host, port, scheme="http" if self._ssl is None else "https")
        self._format = error_format or ErrorFormat()
        self._responder: _Responder | None = None
        if answers:
            self.answer()

    def answer(self) -> None:
        """Start the thread that answers. Idempotent."""
        if self._responder is None:
            self._responder = _Responder(self._listener.dup(), self._ssl, self._config, self._format)

    async def hand_over(self, connection: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        """Stop answering, and accept connections with ``connection`` in the running event loop."""
        self._stop()
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            connection, sock=self._listener, **_tls_options(self._ssl, self._config.connections.header_timeout_s)
        )

    def pause(self) -> None:
        """Stop answering; return when the thread has ended. Connections wait from now on. Idempotent."""
        if self._responder is not None:
            self._responder.stop()
            self._responder.thread.join()
            self._responder = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the answering thread back, so that this process can fork; connections wait meanwhile."""
        has_answered = self._responder is not None
        self.pause()
        yield
        if has_answered:
            self.answer()

    def close(self) -> None:
        """Release the port; idempotent."""
        self._stop()
        self._listener.close()

    def _stop(self) -> None:
        if self._responder is not None:
            self._responder.stop()
            self._responder = None

    def __enter__(self) -> BoundPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def uvicorn_config(app: Any, config: HttpConfig, *, lifespan: str) -> uvicorn.Config:
    """Return uvicorn's settings for ``app``: it logs nothing itself, and reads nothing from the environment."""
    return uvicorn.Config(
        app,
        lifespan="on" if lifespan == "on" else "off",
        interface="asgi3",
        http=Connection,
        log_config=None,
        access_log=False,  # the app logs its requests itself
        server_header=False,
        proxy_headers=False,
        forwarded_allow_ips="",  # given, so that the environment is not asked
        workers=1,
        timeout_keep_alive=config.connections.keep_alive_timeout_s,  # type: ignore[arg-type]  # a float does as well
    )


class _Responder:
    """The thread that answers until the app exists."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext | None, config: HttpConfig, error_format: ErrorFormat
    ) -> None:
        self._listener, self._ssl, self._config, self._format = listener, context, config, error_format
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_started, self._has_stopped = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._main, name="mlsys-http-loading", daemon=True)
        self.thread.start()
        self._is_started.wait()

    def stop(self) -> None:
        """Accept nothing more; the thread answers connected clients, and ends."""
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._has_stopped.wait()

    def _main(self) -> None:
        config = uvicorn_config(self._answer, self._config, lifespan="off")
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(self._serve(config))
        finally:
            self._listener.close()
            self._is_started.set()
            self._has_stopped.set()

    async def _serve(self, config: uvicorn.Config) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        limits, state = self._config.connections, ServerState()
        server = await self._loop.create_server(
            lambda: Connection(limits, config=config, server_state=state, app_state={}),
            sock=self._listener,
            **_tls_options(self._ssl, limits.header_timeout_s),
        )
        self._is_started.set()
        await self._stopping.wait()
        server.close()
        self._has_stopped.set()
        for connection in list(state.connections):
            # One whose request has not come yet is answered when it does, which closes it.
            if not isinstance(connection, Connection) or connection.has_received:
                connection.shutdown()
        deadline = self._loop.time() + limits.header_timeout_s
        while state.connections and self._loop.time() < deadline:
            await asyncio.sleep(_LOOK_S)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request without reading its body."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1013})
            return
        path = scope["path"]
        if path in _HEALTH:
            status, content = _HEALTH[path][0], to_json(_HEALTH[path][1])
        else:
            info = ErrorInfo(
                status=503,
                type="server_error",
                code="loading",
                message="the server is loading its model and takes no requests yet; try again",
                path=path,
            )
            status, content = info.status, to_json(self._format.body(info))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
        ]
        if status == 503:
            headers.append((b"retry-after", b"%d" % _RETRY_AFTER_S))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def _tls_options(context: ssl.SSLContext | None, handshake_timeout_s: float) -> dict[str, Any]:
    return {} if context is None else {"ssl": context, "ssl_handshake_timeout": handshake_timeout_s}
