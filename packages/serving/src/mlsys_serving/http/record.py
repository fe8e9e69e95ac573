"""Facts about one running request: its id, and its response so far; from them a line of the log and its metrics.

The outermost middleware makes the record and follows the request's messages; all within read it. Its id is in
each line of the log, which goes through structlog, in a logger of its own (no global configuration). Metrics are in a
registry of the app's own: several apps in one process do not mix.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TextIO

import structlog
from mlsys_core.config import settings
from mlsys_core.errors import PluginError
from mlsys_core.loop.protocols import Clock
from mlsys_core.plugins.registry import one_line
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
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


# Loggers of the server library; its access lines are replaced by this package's.
_UVICORN = "uvicorn.error"


def make_logger(
    log_format: Literal["json", "console"], *, level: str = "info", stream: TextIO | None = None
) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that writes one line for an event to ``stream`` (default: the process's stderr).

    Args:
        log_format: JSON, or text for people.
        level: ``debug``, ``info``, ``warning`` or ``error``; events below it are dropped.
        stream: destination of the lines.

    Example:
        >>> make_logger("json", stream=sys.stdout).info("started", port=8000)  # doctest: +ELLIPSIS
        {"port": 8000, "event": "started", "level": "info", "timestamp": "..."}
    """
    # Plain tracebacks on purpose: structlog's richer ones show local variables, and with them bodies and keys.
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr if stream is None else stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=True,
    )
    return logger


def log_failure(
    logger: structlog.typing.FilteringBoundLogger,
    event: str,
    error: BaseException,
    blamed: str | None = None,
    **fields: Any,
) -> None:
    """Log ``error``: with its traceback, or in one line if it is a plugin's mistake and ``MLSYS_DEBUG`` is not set.

    Args:
        logger: Destination of the line.
        event: Name of the line.
        error: The exception.
        blamed: Plugin's part that made the mistake; None: the system's own, unless it is a ``PluginError``.
        fields: Further fields of the line.
    """
    if settings().debug or (blamed is None and not isinstance(error, PluginError)):
        logger.error(event, exc_info=error, **fields)
        return
    text = str(error) if isinstance(error, PluginError) else f"{blamed} failed ({one_line(error)})"
    places = traceback.extract_tb((error.__cause__ or error).__traceback__)
    where = f"{places[-1].filename}:{places[-1].lineno}" if places else None
    logger.error(event, error=text, where=where, **fields)


def _to_json(event: Any, *, default: Callable[[Any], Any]) -> str:
    return _encoder(default).encode(event)


@cache
def _encoder(default: Callable[[Any], Any]) -> json.JSONEncoder:
    """Return one JSON encoder for all lines: ``json.dumps`` with a default makes one for each."""
    return json.JSONEncoder(default=default)


class _Forward(logging.Handler):
    """Forwards standard-library records to a structlog logger."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger, is_wanted: Callable[[], bool]) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger
        self._is_wanted = is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_wanted():
            return
        fields: dict[str, Any] = {"source": "uvicorn", "message": record.getMessage().strip()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._logger.log(record.levelno, "server", **fields)


@contextmanager
def forwarded_uvicorn_log(
    logger: structlog.typing.FilteringBoundLogger, *, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Send uvicorn's warnings to ``logger`` within the context, while ``is_wanted()`` is true.

    Whatever the process has set for uvicorn's own logger, such as a level or that it is disabled, does not hold here.
    """
    uvicorn, forward = logging.getLogger(_UVICORN), _Forward(logger, is_wanted)
    before = uvicorn.propagate, uvicorn.level, uvicorn.disabled
    uvicorn.propagate, uvicorn.disabled = False, False
    uvicorn.setLevel(logging.WARNING)
    uvicorn.addHandler(forward)
    try:
        yield
    finally:
        uvicorn.removeHandler(forward)
        uvicorn.propagate, level, uvicorn.disabled = before
        uvicorn.setLevel(level)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# Seconds. From a cache hit to a long generation.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """The metrics every front has.

    Args:
        registry: their registry; ``/metrics`` shows all of it.

    Example:
        >>> metrics = HttpMetrics(CollectorRegistry())
        >>> metrics.observe("/v1/models", "GET", 200, duration_s=0.01)
        >>> labels = {"route": "/v1/models", "method": "GET", "status": "200"}
        >>> metrics.registry.get_sample_value("mlsys_http_requests_total", labels)
        1.0
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.in_flight = Gauge(
            "mlsys_http_requests_in_flight", "Requests whose response has not ended", registry=registry
        )
        self._requests = Counter(
            "mlsys_http_requests", "Requests answered", ("route", "method", "status"), registry=registry
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}  # looking one up by labels is slow
        self._duration = Histogram(
            "mlsys_http_request_duration_seconds",
            "From the request's headers to the end of its response",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )

    def observe(self, route: str, method: str, status: int, *, duration_s: float) -> None:
        """Count one ended request; ``route`` is a template such as ``/v1/models/{name}``."""
        method = method if method in _METHODS else "OTHER"
        key = (route, method, status)
        children = self._children.get(key)
        if children is None:
            children = (self._requests.labels(route, method, str(status)), self._duration.labels(route, method))
            self._children[key] = children
        requests, duration = children
        requests.inc()
        duration.observe(duration_s)


class ObserveMiddleware:
    """Logs and counts requests when their response has ended: route templates, never paths, bodies or keys.

    Args:
        app: the next ASGI app.
        metrics: updated for each request.
        logger: gets one ``request`` event each; ``error`` level from status 500 on.
        clock: the one of the records.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: HttpMetrics, logger: structlog.typing.FilteringBoundLogger, clock: Clock
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._logger = logger
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root_path = scope.get("root_path", "")
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._metrics.in_flight.dec()
            self._note(scope, root_path)

    def _note(self, scope: Scope, root_path: str) -> None:
        record = record_of(scope)
        duration_s = self._clock.now() - record.received_at
        route = route_template(scope, root_path)
        status = record.status or (499 if record.disconnected.is_set() else 500)
        self._metrics.observe(route, scope["method"], status, duration_s=duration_s)
        log = self._logger.error if status >= 500 else self._logger.info
        log(
            "request",
            method=scope["method"],
            route=route,
            status=status,
            duration_ms=round(duration_s * 1000, 3),
            request_id=record.request_id,
            bytes=record.response_nbytes,
            complete=record.is_complete,  # False: the client left, or the stream was cut
        )
