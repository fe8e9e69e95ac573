"""The factory of the front: a repository in, a served-ready app out, with REST and, if asked for, gRPC beside it."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from mlsys_core.serving.http import HttpConfig, ServerAddress
from mlsys_core.serving.oip.repository import ModelRepository
from mlsys_core.serving.protocols import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Where gRPC listens."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one


def create_oip_app(
    repository: ModelRepository,
    *,
    config: HttpConfig | None = None,
    grpc: GrpcConfig | None = None,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> FastAPI:
    """An app that serves ``repository``; loads all its models first, and closes them at the end.

    Args:
        repository: the models; belongs to the app from now on.
        config: limits, keys, names; default ``HttpConfig()``. Holds for gRPC too.
        grpc: None serves REST alone.
        registry: of metrics; subsystems register their collectors in it.
        clock: of deadlines; give it the serving loop's. Default ``WallClock``.
        logger: default one that writes ``config.log_format`` to stderr.

    Returns:
        The app, for ``mlsys_core.serving.http.serve`` or ``BackgroundServer``.
    """
    raise NotImplementedError


def grpc_address_of(app: FastAPI) -> ServerAddress:
    """Where the gRPC server of a started app listens."""
    raise NotImplementedError
