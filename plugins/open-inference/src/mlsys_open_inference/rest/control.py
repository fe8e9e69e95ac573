"""REST routes beside inference: health, metadata, configuration, statistics, the repository, refused ones."""

from __future__ import annotations

from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.descriptions import (
    NO_GENERATE,
    NO_LOG_SETTINGS,
    NO_MEMORY,
    NO_TRACE_SETTINGS,
    index_entry,
    model_config,
    model_metadata,
    model_statistics,
    server_metadata,
)
from mlsys_open_inference.files import load_config
from mlsys_serving.http import HttpError, Readiness, Router, runtime_of
from mlsys_serving.http.bodies import parse_json
from mlsys_serving.http.middleware.gate import check_model_control
from mlsys_serving.models.errors import UnsupportedError
from mlsys_serving.models.repository import ModelRepository
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_REFUSED = {
    "/v2/systemsharedmemory/{rest:path}": NO_MEMORY,
    "/v2/cudasharedmemory/{rest:path}": NO_MEMORY,
    "/v2/trace/setting": NO_TRACE_SETTINGS,
    "/v2/models/{model}/trace/setting": NO_TRACE_SETTINGS,
    "/v2/logging": NO_LOG_SETTINGS,
} | {
    f"/v2/models/{{model}}{version}/{verb}": NO_GENERATE
    for version in ("", "/versions/{version}")
    for verb in ("generate", "generate_stream")
}


def control_router(repository: ModelRepository, readiness: Readiness, *, model_control: bool = False) -> Router:
    """Return the routes; without ``model_control`` clients can neither load nor unload."""
    router = Router(tags=["Open Inference Protocol"])

    # Triton gives these three no body; kserve's client reads the protocol's, Triton's client only the status.
    @router.get("/v2/health/live", summary="200 as long as the process runs")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", summary="200 if requests should be sent here, else 503", response_model=None)
    async def ready() -> JSONResponse:
        is_ready = (await readiness.report()).is_ready
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

    @router.get("/v2", summary="Name, version and extensions of the server")
    async def server() -> dict[str, Any]:
        return server_metadata()

    @router.get("/v2/models/stats", summary="Statistics of all models")
    async def all_statistics() -> dict[str, Any]:
        return {"model_stats": [model_statistics(version) for version in repository.versions()]}

    async def model_ready(model: str, version: str = "") -> dict[str, Any]:
        return {"name": repository.find(model, version).spec.name, "ready": True}

    async def metadata(model: str, version: str = "") -> dict[str, Any]:
        return model_metadata(repository.find(model, version), repository.versions(model, version))

    async def config(model: str, version: str = "") -> dict[str, Any]:
        return model_config(repository.find(model, version))

    async def statistics(model: str, version: str = "") -> dict[str, Any]:
        return {"model_stats": [model_statistics(found) for found in repository.versions(model, version)]}

    for path, endpoint, summary in (
        ("/ready", model_ready, "200 if the model takes requests"),
        ("/config", config, "The model's configuration"),
        ("/stats", statistics, "The model's statistics"),
        ("", metadata, "The model's tensors"),
    ):
        for version in ("", "/versions/{version}"):
            router.add_api_route(f"/v2/models/{{model}}{version}{path}", endpoint, summary=summary, response_model=None)

    @router.post("/v2/repository/index", summary="All models and their states", response_model=None)
    async def index(request: Request) -> JSONResponse:
        asked = await _json_object(request)
        ready_only = asked.get("ready", False)
        if not isinstance(ready_only, bool):
            raise InvalidInputError(f"'ready' is true or false, got {str(ready_only)[:40]!r}")
        return JSONResponse([index_entry(entry) for entry in repository.index(ready_only=ready_only)])

    @router.post("/v2/repository/models/{model}/load", summary="Load a model, or load it anew", response_model=None)
    async def load(model: str, request: Request) -> Response:
        check_model_control(model_control)
        await repository.load(model, load_config((await _json_object(request)).get("parameters") or {}))
        return Response()

    @router.post("/v2/repository/models/{model}/unload", summary="Take a model out of service", response_model=None)
    async def unload(model: str, request: Request) -> Response:
        check_model_control(model_control)
        await _json_object(request)
        await repository.unload(model)
        return Response()

    for path, instead in _REFUSED.items():
        router.add_api_route(
            path, _refusal(instead), methods=["GET", "POST"], include_in_schema=False, response_model=None
        )
    return router


def _refusal(instead: str) -> Any:
    async def refuse() -> Response:
        raise UnsupportedError(instead)

    return refuse


async def _json_object(request: Request) -> dict[str, Any]:
    """Return the body, which is a JSON object or empty.

    Raises:
        HttpError: 415, it is no JSON.
        InvalidInputError: It is something else.
    """
    body = await request.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and media_type not in ("", "application/json"):
        raise HttpError(f"the body is JSON, not {media_type[:80]}", http_status=415)
    value = await runtime_of(request.app).threads.run(parse_json, body, size=len(body)) if body else {}
    if not isinstance(value, dict):
        raise InvalidInputError("the body is a JSON object, or empty")
    return value
