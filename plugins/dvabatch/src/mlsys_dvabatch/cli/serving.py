"""The rest of ``mlsys dvabatch serve``: load the models, then serve them from this process or from several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fastapi import FastAPI
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.instances import instance_group, served_model
from mlsys_dvabatch.serve.models import StageMetrics
from mlsys_dvabatch.serve.preparing import Batching, Prepared, prepare
from mlsys_dvabatch.stages.zoo import Loading
from mlsys_serving.cli import announce
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BoundPort, HttpConfig
from mlsys_serving.http import serve as serve_app
from mlsys_serving.instances import require_processes, serve_instances
from mlsys_serving.models import ArgumentSource, ModelRepository, create_model_app
from prometheus_client import CollectorRegistry
from rich.console import Console


def serve_models(
    arguments: Sequence[str],
    batching: Batching,
    loading: Loading,
    *,
    bound: BoundPort,
    http: HttpConfig,
    num_threads: int | None,
    num_instances: int | None,
    extensions: Extensions,
) -> int:
    """Serve models until a signal comes; return the exit code.

    Args:
        arguments: Names, files or folders.
        batching: Options of their policy.
        loading: Options of loading them.
        bound: The listening port.
        http: Settings of the app.
        num_threads: Cores to use; None: all.
        num_instances: Worker processes of each model; None: this process runs them all.
        extensions: Additions of other distributions.

    Raises:
        InvalidInputError: Options that do not go together, or models that cannot be served.
    """
    console = Console(stderr=True)

    def app_of(repository: ModelRepository, **more: Any) -> FastAPI:
        return create_model_app(repository, config=http, system="dvabatch", unit="task", extensions=extensions, **more)

    def announced(argument: str) -> Prepared:
        with console.status(f"{argument}: loading and profiling"):
            prepared = prepare(argument, settings().cache_dir, batching, loading)
        loaded = prepared.loaded
        console.print(f"{loaded.name}: policy {prepared.policy_name}, {loaded.model.num_stages} stages")
        if prepared.profile is not None and not prepared.profile.is_quiet:
            line = f"{loaded.name}: {prepared.profile.describe()}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return prepared

    if num_instances is not None:
        require_processes("cpu" if loading.device is None else loading.device.kind)
        torch.set_num_threads(1)  # a process with threads cannot fork
        groups = [instance_group(announced(argument), batching) for argument in arguments]
        if len({group.spec.name for group in groups}) != len(groups):
            raise InvalidInputError("two models have the same name: give each model once")
        return serve_instances(
            groups,
            num_instances,
            app_of,
            bound=bound,
            on_ready=lambda address: announce(address, extensions),
            num_cores=num_threads,
        )
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    source = ArgumentSource(lambda argument: served_model(announced(argument), batching, num_threads))
    served = [source.add(argument) for argument in arguments]
    registry = CollectorRegistry()
    registry.register(StageMetrics(source.latest.values()))
    repository = ModelRepository(served, source=source)
    app = app_of(repository, registry=registry)
    return serve_app(app, bound=bound, on_ready=lambda address: announce(address, extensions))
