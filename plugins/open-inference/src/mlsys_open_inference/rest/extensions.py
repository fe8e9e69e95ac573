"""REST routes of two of Triton's extensions: system shared memory, and trace settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.shared_memory import SharedRegions
from mlsys_serving.http import HttpError, Router, runtime_of
from mlsys_serving.http.access import check_model_control
from mlsys_serving.http.json_body import parse_json
from mlsys_serving.http.middleware.trace import Tracing
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.tracing.settings import NOT_TRACED
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_MEMORY = "/v2/systemsharedmemory"


def add_extensions(router: Router, repository: ModelRepository, regions: SharedRegions, *, model_control: bool) -> None:
    """Add the routes; without ``model_control`` clients can read trace settings, and not change them."""

    async def status(name: str = "") -> JSONResponse:
        return JSONResponse(regions.status(name))

    async def unregister(name: str = "") -> Response:
        regions.unregister(name)
        return Response()

    for region in ("", "/region/{name}"):
        router.add_api_route(f"{_MEMORY}{region}/status", status, summary="Shared memory", response_model=None)
        router.add_api_route(
            f"{_MEMORY}{region}/unregister",
            unregister,
            methods=["POST"],
            summary="Forget shared memory",
            response_model=None,
        )

    @router.post(f"{_MEMORY}/region/{{name}}/register", summary="Name a client's shared memory", response_model=None)
    async def register(name: str, request: Request) -> Response:
        asked = await json_object(request)
        key, offset, nbytes = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(nbytes) is not int:
            raise InvalidInputError("a region has a 'key' (a string), a 'byte_size' and an 'offset' (whole numbers)")
        regions.register(name, key, offset, nbytes)
        return Response()

    @router.get("/v2/trace/setting", summary="The settings of traces")
    async def trace(request: Request) -> dict[str, Any]:
        return trace_settings(runtime_of(request.app).tracing)

    @router.get("/v2/models/{model}/trace/setting", summary="The settings of traces, which are the server's")
    async def trace_of_model(model: str, request: Request) -> dict[str, Any]:
        repository.find(model)
        return trace_settings(runtime_of(request.app).tracing)

    @router.post("/v2/trace/setting", summary="Change the settings of traces")
    async def change_trace(request: Request) -> dict[str, Any]:
        check_model_control(model_control, "change trace settings")
        wanted = {name: _texts(name, value) for name, value in (await json_object(request)).items()}
        return change_trace_settings(runtime_of(request.app).tracing, wanted)


def trace_settings(tracing: Tracing | None) -> dict[str, Any]:
    """Return the settings of traces, in Triton's words."""
    return dict(NOT_TRACED) if tracing is None else tracing.settings.shown()


def change_trace_settings(tracing: Tracing | None, wanted: Mapping[str, Sequence[str] | None]) -> dict[str, Any]:
    """Change settings of traces, and return all of them.

    Raises:
        InvalidInputError: The server exports no traces, or a setting that cannot be changed.
    """
    if tracing is None:
        if all(name == "trace_level" and list(value or []) == ["OFF"] for name, value in wanted.items()):
            return trace_settings(None)  # nothing is asked for, or that traces are off, as they are
        raise InvalidInputError("this server exports no traces: start it with --otlp-endpoint")
    tracing.settings.update(wanted)
    return tracing.settings.shown()


async def json_object(request: Request) -> dict[str, Any]:
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


def _texts(name: str, value: object) -> list[str] | None:
    if value is None or isinstance(value, str):
        return None if value is None else [value]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    raise InvalidInputError(f"trace setting {name[:40]!r} is a string, an array of strings or null")
