"""The router for fronts: FastAPI's, with strict JSON bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from mlsys_serving.http.json_body import parse_json


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await self.app.state.mlsys_http.threads.run(parse_json, body, size=len(body))
        return self._json


class JsonRoute(APIRoute):
    """A route whose JSON bodies are read by :func:`.json_body.parse_json`."""

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
