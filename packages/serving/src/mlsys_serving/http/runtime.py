"""The parts of an app beside its routes, and the routes of every app: what requests meet after the app is made."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from mlsys_serving.http.bodies import BodyBudget, parse_json, plain_body
from mlsys_serving.http.config import HttpConfig
from mlsys_serving.http.describe import ErrorAnswers
from mlsys_serving.http.lifecycle import Lifecycle, Readiness
from mlsys_serving.http.middleware.gate import BrowserGuard
from mlsys_serving.http.middleware.trace import Tracing
from mlsys_serving.http.record import HttpMetrics
from mlsys_serving.http.streaming import RequestThreads


@dataclass(frozen=True, slots=True)
class HttpRuntime:
    """Settings of an app and the services beside its routes; :func:`runtime_of` returns it."""

    config: HttpConfig
    readiness: Readiness
    lifecycle: Lifecycle
    metrics: HttpMetrics
    answers: ErrorAnswers
    logger: structlog.typing.FilteringBoundLogger
    clock: Clock
    guard: BrowserGuard  # the server gives it the address
    threads: RequestThreads  # for what would hold up the event loop
    bodies: BodyBudget  # of HTTP and gRPC together
    tracing: Tracing | None  # of HTTP and gRPC together; None: requests are not traced


def runtime_of(app: FastAPI) -> HttpRuntime:
    """Return the runtime of an app that :func:`create_app` made.

    Raises:
        InvalidInputError: it made another app.
    """
    runtime = getattr(getattr(app, "state", None), "mlsys_http", None)
    if not isinstance(runtime, HttpRuntime):
        raise InvalidInputError(f"{app!r} was not made by create_app(); make it there, it adds what the server needs")
    return runtime


def random_ids() -> Callable[[], str]:
    """Return a source of request ids; they need not be secret, so none costs a system call."""
    source = random.Random()
    return lambda: f"{source.getrandbits(128):032x}"


def health_router(readiness: Readiness, registry: CollectorRegistry) -> APIRouter:
    """Return routes that report ``readiness`` and expose ``registry``."""
    router = APIRouter(tags=["health"])

    @router.get("/health/live", summary="200 as long as the process runs")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready", summary="200 if requests should be sent here, else 503", response_model=None)
    async def ready() -> JSONResponse:
        report = await readiness.report()
        return JSONResponse(
            {"status": report.state.value, "checks": report.checks}, status_code=200 if report.is_ready else 503
        )

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    for path, endpoint in (("/health/live", live), ("/health/ready", ready)):
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
    return router


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await plain_body(self)
            self._json = await self.app.state.mlsys_http.threads.run(parse_json, body, size=len(body))
        return self._json


class JsonRoute(APIRoute):
    """A route whose JSON bodies are read by :func:`.bodies.parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler on a request with the strict parser."""
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict_handler


class Router(APIRouter):
    """``fastapi.APIRouter`` with strict JSON bodies; same arguments.

    A plain ``APIRouter`` works with ``create_app`` too, but accepts non-standard values of Python's JSON parser (NaN,
    lone surrogates), which then fail in the response.

    Example:
        >>> router = Router(prefix="/v1")
        >>> @router.post("/echo")
        ... async def echo(body: dict[str, object]) -> dict[str, object]:
        ...     return body
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("route_class", JsonRoute)
        super().__init__(**options)
