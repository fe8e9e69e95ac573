"""Models whose instances are processes: each is loaded once, and has its engine in each worker (ADR 41)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_serving.cli import announce
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BoundPort, HttpConfig
from mlsys_serving.instances import InstanceGroup, serve_instances
from mlsys_serving.models import DirectorySource, ModelRepository, create_model_app
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


def instance_groups(roots: Sequence[Path], config: EngineConfig, *, trust_code: bool = False) -> list[InstanceGroup]:
    """Load all models in ``roots``.

    Returns:
        Each version of each as a group of instances.

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
    groups = [each.group(config) for each in loaded if isinstance(each, _Loaded)]
    return [replace(group, folder=source.directory(group.spec.name)) for group in groups]


def serve_processes(
    groups: Sequence[InstanceGroup],
    num_instances: int,
    *,
    bound: BoundPort,
    http: HttpConfig,
    extensions: Extensions,
) -> int:
    """Serve models from processes until a signal comes; return the exit code.

    Args:
        groups: The models; loaded with one thread.
        num_instances: Worker processes of each.
        bound: The listening port.
        http: Settings of the app.
        extensions: Additions of other distributions.
    """

    def app_of(repository: ModelRepository) -> FastAPI:
        return create_model_app(repository, system="batchmaker", unit="round", extensions=extensions, config=http)

    return serve_instances(
        groups,
        num_instances,
        app_of,
        bound=bound,
        on_ready=lambda address: announce(address, extensions),
    )


def require_processes(config: EngineConfig) -> None:
    """Refuse options that do not go with instances.

    Raises:
        InvalidInputError: One of them.
    """
    if (lack := can_supervise()) is not None:
        raise InvalidInputError(f"--instances: {lack}")
    if config.device != "cpu":
        raise InvalidInputError(f"--instances forks processes, which cannot share {config.device}: leave one out")
