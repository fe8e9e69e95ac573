"""Facts about one running request: recorded by the outermost middleware, read by all within."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from mlsys_serving.http.metrics import UNMATCHED

_SCOPE_KEY = "mlsys.http"


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
        return UNMATCHED
    # Newer FastAPI keeps the prefixes of nested routers in a context of its own, older in the route's path.
    context = scope.get("fastapi", {}).get("effective_route_context")
    path = getattr(context, "path", None) or getattr(scope.get("route"), "path", None)
    mount = scope.get("root_path", "").removeprefix(root_path)
    return f"{mount}{path}" if path else UNMATCHED
