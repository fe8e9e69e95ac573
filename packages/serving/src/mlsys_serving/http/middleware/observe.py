"""One log line and one sample of each metric per request."""

from __future__ import annotations

import structlog
from mlsys_core.loop.protocols import Clock
from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.metrics import HttpMetrics
from mlsys_serving.http.record import record_of, route_template


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
