"""Parts of an engine: its scheduler, its cells, its workers and their executors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from mlsys_core.device import get_device
from mlsys_core.loop import Clock, StreamExecutor, ThreadExecutor
from mlsys_core.loop.protocols import Executor
from mlsys_core.memory import find_pool
from torch import Tensor

from mlsys_batchmaker.config import EngineConfig
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_batchmaker.workers.cuda import RoundTimes, counter_or_events, cuda_graph, to_pinned
from mlsys_batchmaker.workers.materialise import AUTO, MaterialisedCell, find_compiler
from mlsys_batchmaker.workers.pool import SeveralPools, StatePool, plan_rows
from mlsys_batchmaker.workers.worker import Worker


def make_scheduler(model: Model, config: EngineConfig) -> tuple[CellularScheduler, list[StatePool]]:
    """Make the scheduler of a model and the state pool of its device."""
    rows = plan_rows(model.layout, config.pool_bytes)
    pools = [StatePool(model.layout, rows, get_device(config.device).torch_name)]
    scheduler = CellularScheduler(
        model.layout,
        config=config.scheduling(),
        devices=[0] * config.num_workers,
        num_rows=rows,
        store=SeveralPools(pools),
        new_rows=find_pool(config.memory_pool, "runs"),
    )
    return scheduler, pools


def make_cells(model: Model, config: EngineConfig) -> list[MaterialisedCell]:
    """Make a model's cells ready for every batch size, which may take seconds; engines may share them.

    Raises:
        InvalidInputError: A compiler that was asked for by name cannot take a cell.
    """
    device = torch.device(get_device(config.device).torch_name)
    on_gpu = device.type == "cuda"
    compiler = cuda_graph if on_gpu and config.compiler == AUTO else find_compiler(config.compiler)
    is_auto = config.compiler == AUTO
    in_place = is_auto and device.type == "cpu"
    return [
        MaterialisedCell(cell, device=device, compiler=compiler, in_place=in_place, falls_back=is_auto)
        for cell in model.cells
    ]


def make_workers(
    model: Model,
    pools: Sequence[StatePool],
    config: EngineConfig,
    clock: Clock,
    cells: Sequence[MaterialisedCell] | None = None,
) -> list[Worker]:
    """Make workers that share the state pool of their device, and the cells; None: cells are made here."""
    cells = make_cells(model, config) if cells is None else cells
    to_host = to_pinned if pools[0].device.type == "cuda" else Tensor.cpu
    return [Worker(model.layout, cells, pools, clock=clock, to_host=to_host) for _ in range(config.num_workers)]


def make_executor(worker: Worker, config: EngineConfig, clock: Clock, number: int) -> Executor[Round, RoundOutput]:
    """Make the executor of one worker: a thread of its own on the CPU, a stream of its own on any other device."""
    device = get_device(config.device)
    if device.kind == "cpu":
        return ThreadExecutor(worker, max_in_flight=config.max_tasks_to_submit, name=f"batchmaker-{number}")
    return StreamExecutor(
        worker,
        device,
        clock,
        max_in_flight=config.max_tasks_to_submit,
        signal=partial(counter_or_events, device) if device.kind == "cuda" else None,
        finish=RoundTimes(),
    )
