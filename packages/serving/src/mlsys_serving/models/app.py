"""The app of a server of models: it loads a repository, and serves it through the fronts that are installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field

from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import ErrorFormat, HttpConfig, create_app
from mlsys_serving.models.metrics import ModelMetrics
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.watch import Source, Watch

DEFAULT_CONFIG = HttpConfig(max_body_nbytes=64 * 1024 * 1024, validation_status=400)


class ModelError(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: str = Field(description="What was wrong and what to do about it")


ERROR_FORMAT = ErrorFormat(body=lambda info: {"error": info.message}, model=ModelError)


def create_model_app(
    repository: ModelRepository,
    *,
    system: str,
    extensions: Extensions,
    unit: str = "batch",
    config: HttpConfig | None = None,
    routers: Sequence[APIRouter] = (),
    error_format: ErrorFormat = ERROR_FORMAT,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> FastAPI:
    """Return an app that serves ``repository``; it loads all models first, and closes them at the end.

    Args:
        repository: The models; belongs to the app from now on.
        system: Name of the subsystem, for extensions.
        extensions: Additions of other distributions, the fronts of models among them.
        unit: Name of a batch on the live page; models with an attribute ``score_source`` are on it.
        config: Limits, keys, names; default ``DEFAULT_CONFIG``.
        routers: Further routes of the subsystem.
        error_format: The shape of errors; another, where the app gets routes of other protocols too.
        registry: Of metrics; subsystems register their collectors in it.
        clock: Of deadlines; give it the serving loop's. Default ``WallClock``.
        logger: Default one that writes ``config.log_format`` to stderr.

    Returns:
        The app, for ``mlsys_serving.http.serve`` or ``BackgroundServer``. A model that cannot be loaded, or a port
        that is taken, ends its start.
    """
    config = config or DEFAULT_CONFIG
    registry = CollectorRegistry() if registry is None else registry
    registry.register(ModelMetrics(repository))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await repository.load_all()
            yield
        finally:
            await repository.close()

    watch = _watch(repository, unit)
    return create_app(
        config,
        routers=routers,
        lifespan=lifespan,
        served=Served(system=system, extensions=extensions, models=repository, watch=watch),
        error_format=error_format,
        registry=registry,
        clock=clock,
        logger=logger,
    )


def _watch(repository: ModelRepository, unit: str) -> Watch:
    """Return how all models can be watched, those that come later among them."""

    def sources() -> list[Source]:
        found = [getattr(version.model, "score_source", None) for version in repository.versions()]
        return [source for source in found if source is not None]

    def facts() -> dict[str, Any]:
        return {"models": [version.spec.name for version in repository.versions()], "protocol": "oip"}

    return Watch(unit=unit, facts=facts, sources=sources)
