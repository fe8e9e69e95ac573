"""The app of ``mlsys batchmaker serve``: a repository of model directories, REST and gRPC."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import structlog
from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import HttpConfig
from mlsys_serving.models import DirectorySource, ModelRepository, create_model_app
from prometheus_client import CollectorRegistry

from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.store import holds_model
from mlsys_batchmaker.serve.metrics import EngineMetrics, StreamMetrics
from mlsys_batchmaker.serve.oip_model import OipModel, build_model
from mlsys_batchmaker.serve.stream_model import OipStream


def make_app(
    roots: Sequence[Path],
    engine: EngineConfig,
    *,
    extensions: Extensions,
    http: HttpConfig | None = None,
    trust_code: bool = False,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> FastAPI:
    """Make an app that serves all models in ``roots``.

    Args:
        roots: model directories, or directories that hold some.
        engine: settings for running each model.
        extensions: additions of other distributions, the fronts of models among them.
        http: limits and keys; None: the defaults of servers of models.
        trust_code: see :func:`mlsys_batchmaker.models.store.load_model`.
        logger: see ``create_model_app``.

    Raises:
        InvalidInputError: a root is no directory, or there is no model in any.
    """
    alive: weakref.WeakSet[OipModel] = weakref.WeakSet()
    streams: weakref.WeakSet[OipStream] = weakref.WeakSet()
    build = build_model(engine, trust_code=trust_code)

    def build_and_note(directory: Path, name: str, version: str) -> OipModel | OipStream:
        model = build(directory, name, version)
        if isinstance(model, OipModel):
            alive.add(model)
        else:
            streams.add(model)
        return model

    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: [model for model in alive if not model.is_closed]))
    registry.register(StreamMetrics(lambda: [stream for stream in streams if not stream.is_closed]))
    source = DirectorySource(roots, build=build_and_note, marker=holds_model)
    if not source.names():
        raise InvalidInputError(
            f"there is no model in {', '.join(map(str, roots))}; write one there: "
            f"mlsys batchmaker save g2p-en {roots[0]}/g2p-en"
        )
    return create_model_app(
        ModelRepository(source=source),
        system="batchmaker",
        unit="round",
        extensions=extensions,
        config=http,
        registry=registry,
        logger=logger,
    )
