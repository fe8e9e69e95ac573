"""The app of ``mlsys batchmaker serve``: a repository of model directories, in this process or in several."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import HttpConfig
from mlsys_serving.instances import InstanceGroup
from mlsys_serving.models import DirectorySource, Model, ModelRepository, ModelSpec, create_model_app
from prometheus_client import CollectorRegistry

from mlsys_batchmaker.engine import EngineConfig, make_cells
from mlsys_batchmaker.models import store
from mlsys_batchmaker.serve.metrics import EngineMetrics, StreamMetrics
from mlsys_batchmaker.serve.oip_model import OipModel, spec_of
from mlsys_batchmaker.serve.stream_model import OipStream
from mlsys_batchmaker.streams.frames import StreamConfig


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
    models: weakref.WeakSet[OipModel] = weakref.WeakSet()
    streams: weakref.WeakSet[OipStream] = weakref.WeakSet()

    def build(directory: Path, name: str, version: str) -> OipModel | OipStream:
        if store.holds_stream(directory):
            config = StreamConfig(num_workers=engine.num_workers)
            stream = OipStream(store.load_stream(directory), name=name, config=config, version=version)
            streams.add(stream)
            return stream
        model = OipModel(store.load_by_name(directory, name, trust_code=trust_code), engine, version=version)
        models.add(model)
        return model

    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: [model for model in models if not model.is_closed]))
    registry.register(StreamMetrics(lambda: [stream for stream in streams if not stream.is_closed]))
    return app_of(ModelRepository(source=_source(roots, build)), extensions, http, registry=registry, logger=logger)


def app_of(
    repository: ModelRepository,
    extensions: Extensions,
    http: HttpConfig | None,
    *,
    registry: CollectorRegistry | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> FastAPI:
    """Return the app of a repository; see ``create_model_app``."""
    return create_model_app(
        repository,
        system="batchmaker",
        unit="round",
        extensions=extensions,
        config=http,
        registry=registry,
        logger=logger,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model without an engine, as a source of directories gives it."""

    spec: ModelSpec
    build: Callable[[int], OipModel]

    async def close(self) -> None:
        """Free nothing."""


def instance_groups(roots: Sequence[Path], config: EngineConfig, *, trust_code: bool = False) -> list[InstanceGroup]:
    """Load all models in ``roots`` as groups of instances, one for each version.

    A model is loaded once, and has an engine in each worker process (ADR 41).

    Raises:
        InvalidInputError: a root is no directory, holds a stream, or there is no model in any.
    """

    def load(directory: Path, name: str, version: str) -> _Loaded:
        if store.holds_stream(directory):
            raise InvalidInputError(
                f"{directory} is a stream, whose state would die with a worker: serve it without --instances"
            )
        model = store.load_by_name(directory, name, trust_code=trust_code)
        cells = make_cells(model, config)  # before the fork: a worker that takes over has no time

        def build(num_cores: int) -> OipModel:
            torch.set_num_threads(num_cores)
            return OipModel(model, config, version=version, cells=cells)

        return _Loaded(spec_of(model, config, version=version), build)

    source = _source(roots, load)
    return [
        InstanceGroup(spec=each.spec, build=each.build, is_streaming=True, folder=source.directory(name))
        for name in source.names()
        for each in asyncio.run(source.load(name))
        if isinstance(each, _Loaded)
    ]


def _source(roots: Sequence[Path], build: Callable[[Path, str, str], Model]) -> DirectorySource:
    source = DirectorySource(roots, build=build, marker=store.holds_model)
    if not source.names():
        raise InvalidInputError(
            f"there is no model in {', '.join(map(str, roots))}; write one there: "
            f"mlsys batchmaker save g2p-en {roots[0]}/g2p-en"
        )
    return source
