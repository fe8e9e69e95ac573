"""One log line and one sample of each metric per request.

Metrics are in a registry of the app's own: several apps in one process do not mix.
"""

from __future__ import annotations

import structlog
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.record import record_of, route_template

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
