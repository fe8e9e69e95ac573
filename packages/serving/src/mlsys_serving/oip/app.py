"""The factory of the front: it takes a repository and returns an app with REST and, if asked for, gRPC beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import FastAPI
from mlsys_core.errors import ServingError
from mlsys_core.loop.clock import WallClock
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field

from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import ErrorFormat, HttpConfig, Readiness, ServerAddress, create_app, runtime_of
from mlsys_serving.oip.config.cache import CACHE_NBYTES, ResponseCache
from mlsys_serving.oip.config.polling import polled
from mlsys_serving.oip.engine import Engine
from mlsys_serving.oip.models.metrics import ModelMetrics
from mlsys_serving.oip.models.repository import ModelRepository
from mlsys_serving.oip.rest.control import control_router
from mlsys_serving.oip.rest.routes import inference_routes
from mlsys_serving.oip.shared_memory import SharedRegions
from mlsys_serving.watch import Source, Watch

DEFAULT_CONFIG = HttpConfig(
    max_body_nbytes=64 * 1024 * 1024, open_paths=("/health/*", "/metrics", "/v2/health/*"), validation_status=400
)


class OipError(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: str = Field(description="What was wrong and what to do about it")


ERROR_FORMAT = ErrorFormat(body=lambda info: {"error": info.message}, model=OipError)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Address and TLS of the gRPC server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one


def create_oip_app(
    repository: ModelRepository,
    *,
    config: HttpConfig | None = None,
    grpc: GrpcConfig | None = None,
    model_control: bool = False,
    shared_memory: bool = False,
    cache_nbytes: int = CACHE_NBYTES,
    poll_s: float | None = None,
    error_format: ErrorFormat = ERROR_FORMAT,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
    system: str = "",
    unit: str = "batch",
    extensions: Extensions | None = None,
) -> FastAPI:
    """Return an app that serves ``repository``; it loads all models first, and closes them at the end.

    Args:
        repository: the models; belongs to the app from now on.
        config: limits, keys, names, for gRPC too; default ``DEFAULT_CONFIG``.
        grpc: address of the gRPC server; None serves REST alone.
        model_control: let clients load and unload models of the repository's source, and change trace settings.
        shared_memory: let clients on this machine name shared memory in which tensors lie.
        cache_nbytes: of cached responses, all models together.
        poll_s: seconds between two looks at the source's files, which load what has changed; None: nobody looks.
        error_format: the shape of errors; another, where the app gets routes of other protocols too.
        registry: of metrics; subsystems register their collectors in it.
        clock: of deadlines; give it the serving loop's. Default ``WallClock``.
        logger: default one that writes ``config.log_format`` to stderr.
        system: name of the subsystem, for the score's page; models with an attribute ``score_source`` are on it.
        unit: name of a column there.
        extensions: additions of other distributions; None: there are none.

    Returns:
        The app, for ``mlsys_serving.http.serve`` or ``BackgroundServer``. A model that cannot be loaded, or a port
        that is taken, ends its start.
    """
    config, clock, readiness = config or DEFAULT_CONFIG, clock or WallClock(), Readiness()
    registry = CollectorRegistry() if registry is None else registry
    registry.register(ModelMetrics(repository))
    regions = SharedRegions(is_allowed=shared_memory)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await repository.load_all()
            async with polled(repository, poll_s, runtime_of(app).logger):
                if grpc is None:
                    yield
                else:
                    from mlsys_serving.oip.grpc.server import (
                        GrpcServer,
                    )  # only who serves gRPC pays for its import

                    async with GrpcServer(engine, runtime_of(app), model_control=model_control).serving(
                        grpc.host, grpc.port
                    ) as address:
                        app.state.oip_grpc_address = address
                        yield
        finally:
            await repository.close()
            regions.close()

    app = create_app(
        config,
        routers=[control_router(repository, readiness, regions, model_control=model_control)],
        lifespan=lifespan,
        error_format=error_format,
        readiness=readiness,
        registry=registry,
        clock=clock,
        logger=logger,
        served=Served(
            system=system or config.title,
            extensions=extensions or Extensions(),
            models=repository,
            watch=_watch(repository, unit),
        ),
    )
    engine = Engine(repository, clock, runtime_of(app).threads, regions, ResponseCache(cache_nbytes))
    app.router.routes[:0] = inference_routes(engine, config)  # first, as most requests are for them
    return app


def _watch(repository: ModelRepository, unit: str) -> Watch:
    """Return how all models can be watched, those that come later among them."""

    def sources() -> list[Source]:
        found = [getattr(version.model, "score_source", None) for version in repository.versions()]
        return [source for source in found if source is not None]

    def facts() -> dict[str, Any]:
        return {"models": [version.spec.name for version in repository.versions()], "protocol": "oip"}

    return Watch(unit=unit, facts=facts, sources=sources)


def grpc_address_of(app: FastAPI) -> ServerAddress:
    """Return the address of the gRPC server of ``app``.

    Raises:
        ServingError: it has none, or has not started.
    """
    address = getattr(app.state, "oip_grpc_address", None)
    if not isinstance(address, ServerAddress):
        raise ServingError("this app serves no gRPC, or has not started: give create_oip_app a GrpcConfig and serve it")
    return address
