"""The outermost middleware: gives each request its id and its record, and follows its messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import structlog
from mlsys_core.loop.protocols import Clock
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_serving.http.record import RequestRecord, attach

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContextMiddleware:
    """Takes a good ``X-Request-Id`` or makes one; sends it back and binds it into the log context as ``request_id``.

    Args:
        app: the next ASGI app.
        clock: of the record's times.
        new_request_id: makes ids of requests that bring none.
    """

    def __init__(self, app: ASGIApp, *, clock: Clock, new_request_id: Callable[[], str]) -> None:
        self._app = app
        self._clock = clock
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else self._new_request_id()
        record = RequestRecord(request_id=request_id, received_at=self._clock.now())
        attach(scope, record)
        scope.setdefault("state", {})["request_id"] = request_id
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._app(scope, _followed_receive(record, receive), _followed_send(record, send))


def _followed_send(record: RequestRecord, send: Send) -> Send:
    async def followed(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = record.request_id
            record.note_start(message)
        elif message["type"] == "http.response.body":
            record.note_body(message)
        await send(message)
        if message.get("more_body", False):
            # A server's send need not wait for anything: a stream that does not either would hold the event loop for
            # itself, and nobody would hear that its client has left.
            await asyncio.sleep(0)

    return followed


def _followed_receive(record: RequestRecord, receive: Receive) -> Receive:
    # One reader at a time: a streaming response and ``cancel_on_disconnect`` may both wait for the disconnect, and ASGI
    # does not promise that a server tells it twice.
    lock = asyncio.Lock()

    async def followed() -> Message:
        async with lock:
            if record.disconnected.is_set():
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.disconnect" and not record.is_complete:
                record.disconnected.set()
            return message

    return followed
