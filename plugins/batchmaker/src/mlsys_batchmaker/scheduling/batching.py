"""Algorithm 1 of the BatchMaker paper: which cell type a worker runs next, and the tasks formed of it.

Departures from its letter, which are decisions (docs/batchmaker.md): only nodes that this worker may take are counted
as ready, an empty batch is never submitted, and ``>=`` stands where the prose says "more than".
"""

from __future__ import annotations

import numpy as np
from mlsys_core.loop import WorkerId
from numpy.typing import NDArray

from mlsys_batchmaker.scheduling.state import State
from mlsys_batchmaker.scheduling.tasks import Task


def schedule(state: State, worker: WorkerId) -> list[Task]:
    """Choose a cell type by the three criteria and form its tasks (``Schedule(worker)``); [] if nothing can run."""
    cells = state.layout.cells
    counts = [count_ready(state, cell, worker, spec.max_batch_size) for cell, spec in enumerate(cells)]
    candidates = [cell for cell, count in enumerate(counts) if count >= cells[cell].max_batch_size]
    if not candidates:
        candidates = [cell for cell, count in enumerate(counts) if count and not state.running[cell]]
    if not candidates:
        candidates = [cell for cell, count in enumerate(counts) if count]
    if not candidates:
        return []
    return _batch(state, max(candidates, key=lambda cell: cells[cell].priority), worker)


def _batch(state: State, cell: int, worker: WorkerId) -> list[Task]:
    """Form tasks of up to `State.max_steps` steps together (``Batch(ct, worker)``).

    The first task always goes, later ones from Bsizes.Min() rows on.
    """
    spec = state.layout.cells[cell]
    tasks: list[Task] = []
    steps_left = state.max_steps(cell)
    while steps_left:
        if tasks and count_ready(state, cell, worker, spec.min_batch_size) < spec.min_batch_size:
            break
        task = form(state, cell, worker, steps_left)
        if task is None:
            break
        if tasks and task.kept is not None:  # chains write over their own rows, so nobody else reads them
            tasks[-1].is_stored = False
        tasks.append(task)
        steps_left -= task.steps
        state.running[cell] += 1
    return tasks


def count_ready(state: State, cell: int, worker: WorkerId, limit: int) -> int:
    """Count the ready nodes that ``worker`` may take, as far as ``limit`` (NumReadyNodes)."""
    ready = state.ready[cell]
    if len(state.devices) == 1 or not len(ready):
        return min(len(ready), limit)
    return state.calls.count_ready(cell, worker, limit)


def form(state: State, cell: int, worker: WorkerId, max_steps: int) -> Task | None:
    """Form a task (``FormBatchedTask``); pin its subgraphs and update dependencies (``UpdateNodesDependency``)."""
    is_blind = state.is_blind(cell)
    is_chunk = state.config.batching == "chunk" and state.cells[cell].is_chain and not is_blind
    task = state.calls.form(
        cell,
        worker,
        max_steps=max_steps if is_chunk else 1,
        is_blind=is_blind,
        carry=state.carry[cell],
    )
    if task is not None:
        state.counters.gathers += task.kept is None
        if state.homes is not None:
            task.homes = _homes(state, state.homes, task, state.devices[worker])
    return task


def _homes(state: State, lie: list[NDArray[np.int8]], task: Task, device: int) -> tuple[NDArray[np.int64] | None, ...]:
    """Return by input, where rows lie on another device, the device of each row; note where the outputs will lie.

    After unpinning, a subgraph's state still lies where it was computed: a worker elsewhere copies it (section 4.3).
    Constants lie everywhere, so later steps of a chunk read nothing from elsewhere but what its first step reads too.
    """
    found: list[NDArray[np.int64] | None] = []
    for index in range(task.in_rows.shape[2]):
        if task.kept is not None and task.kept[index] >= 0:
            found.append(None)
            continue
        rows = task.in_rows[0, :, index] if task.carry[index] >= 0 else task.in_rows[:, :, index]
        homes = lie[state.layout.input_banks[task.cell, index]][rows].astype(np.int64)
        is_away = (homes >= 0) & (homes != device)
        state.counters.copied_rows += int(np.count_nonzero(is_away))
        found.append(np.where(is_away, homes, device) if is_away.any() else None)
    for index in range(task.out_rows.shape[1]):
        lie[state.layout.output_banks[task.cell, index]][task.out_rows[:, index]] = device
    return tuple(found)
