"""All routes of one served model."""

from __future__ import annotations

from typing import Literal

from fastapi import Depends, Request, Response
from mlsys_serving.http import HttpError, Router
from pydantic import BaseModel

from mlsys_orca.api import chat, completions, messages, responses, tokens
from mlsys_orca.api import control as control_routes
from mlsys_orca.api.answers import STREAMED
from mlsys_orca.api.batches import batch_routes, file_routes
from mlsys_orca.api.batches.lifetime import Batches
from mlsys_orca.api.control import ModelControl
from mlsys_orca.api.errors import unknown_model
from mlsys_orca.api.identity import owner_of
from mlsys_orca.api.intake import intake_route
from mlsys_orca.api.resume.keeper import AnswerKeeper
from mlsys_orca.api.service import ModelService


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


def make_router(service: ModelService, keeper: AnswerKeeper, batches: Batches, control: ModelControl) -> Router:
    """Return the endpoints over ``service``, of streams and batches that are kept, and those that change the model."""
    router = Router(tags=["Orca"], route_class=intake_route(service.front, keeper.go_on))
    for endpoint in (chat, completions, responses, messages):
        endpoint.add_routes(router, service, keeper)
    tokens.add_routes(router, service)
    _add_models(router, service)
    kept = Router(route_class=intake_route(service.front, keeper.go_on), dependencies=[Depends(batches.using)])
    for module in (file_routes, batch_routes):
        module.add_routes(kept, batches)
    router.include_router(kept)
    control_routes.add_routes(router, service, control)

    @router.get("/v1/streams/{key}", responses=STREAMED)
    async def stream(key: str, request: Request) -> Response:
        """Return the events of a stream that was asked for, behind the one that Last-Event-ID names or all of them."""
        if (rest := await keeper.go_on(request)) is not None:
            return rest
        return keeper.respond(request, await keeper.get(key, owner_of(request)))

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
