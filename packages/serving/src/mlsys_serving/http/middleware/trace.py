"""A span of OpenTelemetry per request, from its first byte to its last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.middleware.gate import OpenPaths
from mlsys_serving.http.record import record_of, route_template
from mlsys_serving.tracing.config import TraceConfig
from mlsys_serving.tracing.record import Fact, RequestTrace, current_trace

if TYPE_CHECKING:
    from mlsys_serving.tracing.otlp import OpenRequest, Tracer


class Tracing:
    """Traces of one server, HTTP and gRPC.

    Args:
        config: Where they go.
        service: Name of the server, where the environment gives none.
    """

    def __init__(self, config: TraceConfig, *, service: str) -> None:
        self._config, self._service = config, service
        self._tracer: Tracer | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Export traces while the context is open; the app's lifespan, which runs after any fork."""
        from mlsys_serving.tracing.otlp import Tracer  # only a server with traces pays for its import

        self._tracer = tracer = await asyncio.to_thread(Tracer, self._config, service=self._service)
        try:
            yield
        finally:
            self._tracer = None
            await asyncio.to_thread(tracer.close)

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str], facts: Mapping[str, Fact]) -> Iterator[OpenRequest | None]:
        """Trace the request that the context is open for; None: the sampler leaves it out, or nothing is exported."""
        if self._tracer is None:
            yield None
            return
        with self._tracer.request(name, headers, facts) as opened:
            before = current_trace.get()
            current_trace.set(None if opened is None else opened.trace)
            try:
                yield opened
            finally:
                current_trace.set(before)  # no token: a generator may be closed in another context


class TraceMiddleware:
    """Traces requests; those to ``open_paths``, which are health checks and metrics, are left out.

    Args:
        app: The next ASGI app.
        tracing: The server's.
        open_paths: Of ``HttpConfig``.
    """

    def __init__(self, app: ASGIApp, *, tracing: Tracing, open_paths: tuple[str, ...]) -> None:
        self._app, self._tracing, self._open_paths = app, tracing, OpenPaths(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        root_path, method = scope.get("root_path", ""), scope["method"]
        record = record_of(scope)
        facts = {"http.request.method": method, "mlsys.request_id": record.request_id}
        with self._tracing.request(method, Headers(scope=scope), facts) as opened:
            if opened is None:
                await self._app(scope, receive, send)
                return
            try:
                with structlog.contextvars.bound_contextvars(trace_id=opened.trace_id):
                    await self._app(scope, receive, send)
            finally:
                _conclude(opened.trace, scope, root_path)


def _conclude(trace: RequestTrace, scope: Scope, root_path: str) -> None:
    """Note how the response ended."""
    record, route = record_of(scope), route_template(scope, root_path)
    trace.name, trace.facts["http.route"] = f"{scope['method']} {route}", route
    status = record.status or (499 if record.disconnected.is_set() else 500)
    trace.facts["http.response.status_code"] = status
    trace.facts["http.response.body.size"] = record.response_nbytes
    trace.facts["mlsys.is_complete"] = record.is_complete
    trace.is_error = status >= 500
