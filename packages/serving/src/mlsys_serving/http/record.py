"""Facts about one running request: its id, and its response so far.

The outermost middleware makes the record and follows the request's messages; all within read it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from mlsys_core.loop.protocols import Clock
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SCOPE_KEY = "mlsys.http"
_UNMATCHED = "<unmatched>"  # the one route label of all paths that match no route: clients cannot add labels


@dataclass(slots=True)
class RequestRecord:
    """One request and its response so far; owned by its ASGI call."""

    request_id: str
    received_at: float  # seconds of the app's clock
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)  # set once any reader saw the client go
    status: int | None = None  # of the response; None: not started
    content_type: str = ""  # of the response
    has_length: bool = False  # the response declared its length: nothing can be added to it
    response_nbytes: int = 0  # of the response's body so far
    is_complete: bool = False  # the response's last byte was handed to the server

    def note_start(self, message: Any) -> None:
        """Take note of an ``http.response.start`` message."""
        headers = Headers(raw=message.get("headers", []))
        self.status = message["status"]
        self.content_type = headers.get("content-type", "")
        self.has_length = "content-length" in headers

    def note_body(self, message: Any) -> None:
        """Take note of an ``http.response.body`` message."""
        self.response_nbytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)


def attach(scope: Scope, record: RequestRecord) -> None:
    """Make ``record`` available to everything inside."""
    scope[_SCOPE_KEY] = record


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that ``scope`` belongs to."""
    record: RequestRecord = scope[_SCOPE_KEY]
    return record


def request_id_of(scope: Scope) -> str | None:
    """Return the request's id; None outside of an app of this package, and for WebSockets."""
    record: RequestRecord | None = scope.get(_SCOPE_KEY)
    return None if record is None else record.request_id


def route_template(scope: Scope, root_path: str) -> str:
    """Return the template of the request's route, with all prefixes; ``<unmatched>`` if there was none.

    Args:
        scope: after the application ran: routers leave their choice in it.
        root_path: ``scope["root_path"]`` before it ran; mounts extend it.
    """
    if "endpoint" not in scope:
        return _UNMATCHED
    # Newer FastAPI keeps the prefixes of nested routers in a context of its own, older in the route's path.
    context = scope.get("fastapi", {}).get("effective_route_context")
    path = getattr(context, "path", None) or getattr(scope.get("route"), "path", None)
    mount = scope.get("root_path", "").removeprefix(root_path)
    return f"{mount}{path}" if path else _UNMATCHED


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
