"""``/health/live``, ``/health/ready`` and ``/metrics``, for orchestrators and Prometheus servers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mlsys_serving.http.lifecycle import Readiness


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
