"""The HTTP server of one model: the engine's life inside the app's, the OpenAI routes, and its metrics."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import Response
from mlsys_core.device import get_device
from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import HttpConfig, HttpError, Readiness, Router, create_app
from mlsys_serving.watch import Watch
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from mlsys_orca.api import chat, completions, tokens
from mlsys_orca.api.intake import intake_route
from mlsys_orca.api.metrics import EngineMetrics
from mlsys_orca.api.service import ModelService, unknown_model
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.loaded import LoadedModel

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mlsys_core.loop import LoopRecorder
    from structlog.typing import FilteringBoundLogger

    from mlsys_orca.parallel.ranks import ParallelModel


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


def make_router(service: ModelService) -> Router:
    """Return the endpoints over ``service``."""
    router = Router(tags=["Orca"], route_class=intake_route(service))
    for endpoint in (chat, completions, tokens):
        endpoint.add_routes(router, service)
    _add_models(router, service)

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


def available_memory_nbytes(device: str = "cpu") -> int:
    """Return the memory that this process may still take on the device of that name, without swapping."""
    return get_device(device).memory_info().available_nbytes


def say_to_terminal(line: str) -> None:
    """Print a line about the server's state."""
    print(f"mlsys: {line}", file=sys.stderr, flush=True)


def make_service(
    loaded: LoadedModel,
    name: str,
    config: EngineConfig,
    *,
    recorder: LoopRecorder | None = None,
    parallel: ParallelModel | None = None,
) -> ModelService:
    """Make a service over a new engine, whose thread starts with the app.

    The parts of a divided model, ``parallel``, are loaded by processes that end with the engine; this process must have
    a single thread.
    """
    holders = None
    if parallel is not None:
        from mlsys_orca.parallel.group import holders_of
        from mlsys_orca.parallel.parts import with_parts

        holders = holders_of(parallel, say=say_to_terminal)
        try:
            holders.start()
        except BaseException:
            holders.close()
            raise
        loaded = with_parts(loaded, holders.loaded)
    available_nbytes = available_memory_nbytes(loaded.device)
    if holders is not None and holders.available_nbytes is not None:
        available_nbytes = holders.available_nbytes
    engine = Engine(loaded, config, available_nbytes=available_nbytes, recorder=recorder, holders=holders)
    return ModelService(name, loaded, engine)


def make_app(
    service: ModelService,
    http: HttpConfig,
    *,
    extensions: Extensions | None = None,
    logger: FilteringBoundLogger | None = None,
) -> FastAPI:
    """Make the app that serves ``service``; its lifespan starts and ends the engine.

    Args:
        service: The model.
        http: Settings of the app.
        extensions: Additions of other distributions; None: there are none.
        logger: See ``create_app``.
    """
    engine = service.engine

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.warm_up)
        engine.start()
        try:
            await engine.ready()
            yield
        finally:
            await asyncio.to_thread(engine.close)
            service.front.close()

    readiness = Readiness()
    readiness.add_check("engine", lambda: None if (failure := engine.failure) is None else str(failure))
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine))
    return create_app(
        http,
        routers=[make_router(service)],
        lifespan=lifespan,
        readiness=readiness,
        registry=registry,
        logger=logger,
        served=Served(system="orca", extensions=extensions or Extensions(), engine=service, watch=watch_of(service)),
    )


def watch_of(service: ModelService) -> Watch:
    """Return how a service's iterations can be watched."""
    engine, loaded = service.engine, service.loaded
    shape, config = engine.shape, engine.config

    def facts() -> dict[str, Any]:
        return {
            "model": service.name,
            "policy": config.policy,
            "protocol": "openai",
            "chat": loaded.chat_template is not None,
            "max_batch_size": config.max_batch_size,
            "max_waiting": config.max_waiting,
            "max_model_len": shape.max_model_len,
            "num_blocks": shape.num_blocks,
            "block_size": shape.block_size,
            "num_lanes": config.num_replicas,
            "num_draft_tokens": config.num_draft_tokens,
        }

    sources = [] if engine.score_source is None else [engine.score_source]
    return Watch(unit="iteration", facts=facts, sources=lambda: sources)


def model_name(model: str) -> str:
    """Return the name that clients use for a model given by name or path."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or model
