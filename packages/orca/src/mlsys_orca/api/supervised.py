"""The server as several processes: a front, a worker for each replica, and one that waits to take over."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from mlsys_core.memory.pages import return_freed_memory
from mlsys_core.plugins import installed_plugins
from mlsys_serving.http import HttpConfig, serve
from mlsys_serving.processes import Boxes, RestartBudget, Supervisor, SupervisorLink

from mlsys_orca.api.server import available_memory_nbytes, make_app, say_to_terminal
from mlsys_orca.api.service import ModelService
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.engine.core import plan_engine
from mlsys_orca.engine.crash_points import CrashPoints
from mlsys_orca.engine.fleet.fleet import RemoteEngine
from mlsys_orca.engine.settings import EngineConfig, EngineShape
from mlsys_orca.engine.worker import Worker, WorkerSettings
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import shared_empty
from mlsys_orca.text.guides import GuideMaker

if TYPE_CHECKING:
    from mlsys_serving.extensions import Extensions
    from mlsys_serving.http import ServerAddress
    from mlsys_serving.http.port import BoundPort

    from mlsys_orca.parallel.ranks import ParallelModel, RankHolders

_NUM_BOXES = 64  # workers at a time, at most


def serve_supervised(
    loaded: LoadedModel,
    name: str,
    config: EngineConfig,
    http: HttpConfig,
    *,
    bound: BoundPort,
    extensions: Extensions | None = None,
    on_ready: Callable[[ModelService, ServerAddress], None] | None = None,
    budget: RestartBudget | None = None,
    crash_points: CrashPoints | None = None,
    parallel: ParallelModel | None = None,
) -> int:
    """Serve a model from forked processes until SIGTERM or SIGINT; return the exit code.

    The model lies in this process's memory, which the others share; keys and values lie in memory that survives a
    worker. This process must have a single thread: load the model with torch's number of threads at 1.

    Args:
        loaded: The model.
        name: Its name for clients.
        config: Limits of each replica, and how many there are.
        http: Settings of the app.
        bound: The listening port.
        extensions: Additions of other distributions; None: there are none.
        on_ready: Called in the front, when requests are taken.
        budget: Limit on restarts.
        crash_points: Where the first worker is killed, for tests.
        parallel: The model's parts, which other processes load and run; ``loaded`` then has no weights. None: workers
            run the model of ``loaded``.

    Raises:
        InvalidInputError: the limits do not fit the model or the memory.
        ServingError: this process has threads.
    """
    with ExitStack() as stack:
        holders: RankHolders | None = None
        if parallel is not None:
            from mlsys_orca.parallel.group import holders_of
            from mlsys_orca.parallel.parts import with_parts

            holders = holders_of(parallel, num_replicas=config.num_replicas, say=say_to_terminal)
            stack.callback(holders.close)
            with bound.paused():  # who has threads cannot fork
                holders.fork()
            holders.wait()
            loaded = with_parts(loaded, holders.loaded)
        available_nbytes = available_memory_nbytes(loaded.device) // config.num_replicas
        if holders is not None and holders.available_nbytes is not None:
            available_nbytes = holders.available_nbytes
        shape, _, _ = plan_engine(loaded, config, available_nbytes, installed_plugins().registry)
        config = replace(config, num_kv_tokens=shape.num_kv_tokens)
        guides = GuideMaker(loaded.tokenizer, loaded.config.vocab_size)
        loaded.tokenizer.warm_up()
        guides.warm_up()
        return_freed_memory()  # of loading: each forked process would have a copy of what it writes to there
        settings = _settings(loaded, config, shape, guides, holders)
        boxes = Boxes(_NUM_BOXES)
        bound.pause()

        def front(link: SupervisorLink) -> int:
            engine = RemoteEngine(shape, config, link, boxes)
            service = ModelService(name, loaded, engine, guides=guides)
            return serve(
                make_app(service, http, extensions=extensions),
                bound=bound,
                on_ready=None if on_ready is None else lambda address: on_ready(service, address),
            )

        def worker(number: int, end: socket.socket) -> None:
            points = crash_points if crash_points is not None and number == 0 else CrashPoints()
            Worker(replace(settings, crash_points=points), end, boxes.box(number)).run()

        standing = [] if holders is None else holders.standing
        return Supervisor(
            front, worker, num_workers=config.num_replicas, boxes=boxes, budget=budget, standing=standing
        ).run()


def _settings(
    loaded: LoadedModel,
    config: EngineConfig,
    shape: EngineShape,
    guides: GuideMaker,
    holders: RankHolders | None,
) -> WorkerSettings:
    """Return the settings of workers that run the model, or have ranks run its parts."""
    if holders is not None:
        from mlsys_orca.engine.divided import group_shape

        group = group_shape(holders.model, loaded.config, shape, config)
        return WorkerSettings(loaded, config, guides, (), CrashPoints(), holders, group)
    kv_caches = [
        new_kv_cache(
            loaded.model,
            num_blocks=shape.num_blocks,
            num_states=shape.num_states or 1,
            dtype=shape.kv_dtype,
            empty=shared_empty,
        )
        for _ in range(config.num_replicas)
    ]
    return WorkerSettings(loaded, config, guides, kv_caches, CrashPoints())
