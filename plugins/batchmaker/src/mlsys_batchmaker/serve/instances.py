"""Models whose instances are processes: each is loaded once, and has its engine in each worker (ADR 41)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_serving.cli import announce
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BoundPort, HttpConfig
from mlsys_serving.instances import InstanceGroup, serve_instances
from mlsys_serving.oip import DirectorySource, GrpcConfig, ModelRepository, create_oip_app
from mlsys_serving.oip.config.settings import ModelSettings
from mlsys_serving.oip.ensembles.plan import Declared
from mlsys_serving.processes import can_supervise

from mlsys_batchmaker.engine import EngineConfig, make_cells
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.store import holds_model, holds_stream, load_by_name
from mlsys_batchmaker.serve.oip_model import OipModel, spec_of


class _Loaded:
    """A model without an engine, as a source of directories gives it."""

    def __init__(self, model: Model, config: EngineConfig, version: str) -> None:
        self.model, self.version = model, version
        self.spec = spec_of(model, config, version=version)
        self._cells = make_cells(model, config)  # before the fork: a worker that takes over has no time

    def group(self, config: EngineConfig) -> InstanceGroup:
        """Return its instances."""
        return InstanceGroup(spec=self.spec, build=partial(self._build, config), is_streaming=True)

    def _build(self, config: EngineConfig, num_cores: int) -> OipModel:
        torch.set_num_threads(num_cores)
        return OipModel(self.model, config, version=self.version, cells=self._cells)

    async def close(self) -> None:
        """Free nothing."""


def instance_groups(
    roots: Sequence[Path], config: EngineConfig, *, trust_code: bool = False
) -> tuple[list[InstanceGroup], Callable[[str], Path | None]]:
    """Load all models in ``roots``.

    Returns:
        Each version of each as a group of instances, and what returns a model's own folder.

    Raises:
        InvalidInputError: A root is no directory, holds a stream, or there is no model in any.
    """

    def load(directory: Path, name: str, version: str) -> _Loaded:
        if holds_stream(directory):
            raise InvalidInputError(
                f"{directory} is a stream, whose state would die with a worker: serve it without --instances"
            )
        model = load_by_name(directory, trust_code=trust_code)
        model.name = name
        return _Loaded(model, config, version)

    source = DirectorySource(roots, build=load, marker=holds_model)
    if not source.names():
        raise InvalidInputError(f"there is no model in {', '.join(map(str, roots))}")
    loaded = [each for name in source.names() for each in asyncio.run(source.load(name))]
    return [each.group(config) for each in loaded if isinstance(each, _Loaded)], source.directory


def serve_processes(
    groups: Sequence[InstanceGroup],
    num_instances: int,
    *,
    bound: BoundPort,
    http: HttpConfig,
    grpc: GrpcConfig | None,
    settings_of: Callable[[str], ModelSettings | None],
    composed: Sequence[Declared],
    extensions: Extensions,
    **options: Any,
) -> int:
    """Serve models from processes until a signal comes; return the exit code.

    Args:
        groups: The models; loaded with one thread.
        num_instances: Worker processes of each.
        bound: The listening port.
        http: Settings of the app.
        grpc: Settings of gRPC; None: REST alone.
        settings_of: The configuration of a model, by name.
        composed: Ensembles and cascades of the models.
        extensions: Additions of other distributions.
        options: Further ones of ``create_oip_app``.
    """

    def app_of(repository: ModelRepository) -> FastAPI:
        return create_oip_app(
            repository, config=http, grpc=grpc, system="batchmaker", unit="round", extensions=extensions, **options
        )

    return serve_instances(
        groups,
        num_instances,
        app_of,
        bound=bound,
        on_ready=lambda address: announce(address, grpc, extensions),
        settings_of=settings_of,
        composed=composed,
    )


def require_processes(config: EngineConfig, *, model_control: bool, polls: bool = False) -> None:
    """Refuse options that do not go with instances.

    Raises:
        InvalidInputError: One of them.
    """
    if (lack := can_supervise()) is not None:
        raise InvalidInputError(f"--instances: {lack}")
    if config.device != "cpu":
        raise InvalidInputError(f"--instances forks processes, which cannot share {config.device}: leave one out")
    if model_control or polls:
        option = "--model-control" if model_control else "--poll-seconds"
        raise InvalidInputError(f"--instances loads all models before it forks: leave out {option}")
