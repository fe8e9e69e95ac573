"""All routes of one served model."""

from __future__ import annotations

from typing import Literal

from fastapi import Response
from mlsys_serving.http import HttpError, Router
from pydantic import BaseModel

from mlsys_orca.api import chat, completions, tokens
from mlsys_orca.api import control as control_routes
from mlsys_orca.api.control import ModelControl
from mlsys_orca.api.intake import intake_route
from mlsys_orca.api.service import ModelService, unknown_model


class ModelCard(BaseModel):
    """One model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlsys"
    max_model_len: int  # tokens of prompt and answer
    parent: str | None = None  # of an adapter, the model it is added to


class ModelList(BaseModel):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def make_router(service: ModelService, control: ModelControl) -> Router:
    """Return the endpoints over ``service``, and those that change its adapters."""
    router = Router(tags=["Orca"], route_class=intake_route(service))
    for endpoint in (chat, completions, tokens):
        endpoint.add_routes(router, service)
    _add_models(router, service)
    control_routes.add_routes(router, service, control)

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """Answer 200 with an empty body while the engine runs, as vLLM does."""
        if (failure := service.engine.failure) is not None:
            raise HttpError(f"the engine does not run: {failure}", http_status=503)
        return Response()

    return router


def _add_models(router: Router, service: ModelService) -> None:
    def cards() -> list[ModelCard]:
        length = service.engine.max_model_len
        return [
            ModelCard(
                id=name,
                created=service.created,
                max_model_len=length,
                parent=None if name == service.name else service.name,
            )
            for name in service.names
        ]

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """List the models served here: the one that generates and its adapters."""
        return ModelList(data=cards())

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> ModelCard:
        """Describe one model."""
        for card in cards():
            if card.id == name:
                return card
        raise unknown_model(name, [card.id for card in cards()])
