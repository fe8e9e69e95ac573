"""A worker: runs the rounds it is given, one after another, on one device (BatchMaker, sections 4.2 and 5).

Cells that have compiled loops read and write the state pool's rows in place. For the others, inputs are gathered into
contiguous batches, only when the set of requests changed: where the same requests go on, the last task's outputs are
the next one's inputs. Its thread, task queue and completion queue are core's ``ThreadExecutor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mlsys_batchmaker.cells.cell import RunsSteps, torch_dtype
from mlsys_batchmaker.native.runner import Runner
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.scheduling.tasks import Ints, Round, RoundOutput, Task
from mlsys_batchmaker.workers.materialise import MaterialisedCell
from mlsys_batchmaker.workers.pool import StatePool
from mlsys_core.errors import ServingError
from mlsys_core.loop import Clock
from mlsys_serving.isolation import run_in_halves
from numpy.typing import NDArray
from torch import Tensor


class Worker:
    """Worker that computes rounds on one device; calls must come one after another, from one thread.

    Args:
        layout: layout of the model.
        cells: by number, materialised for this device.
        pools: pools of all devices, by number; rows that another device has are fetched from its pool.
        device: number of this worker's.
        clock: the loop's.
        num_threads: threads of torch, in the thread that calls; None leaves them as they are.
        to_host: copies results; where it does not wait, they are valid only when the device gets there.
    """

    def __init__(
        self,
        layout: Layout,
        cells: Sequence[MaterialisedCell],
        pools: Sequence[StatePool],
        *,
        device: int = 0,
        clock: Clock,
        num_threads: int | None = 1,
        to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
    ) -> None:
        self._layout = layout
        self._cells = list(cells)
        self._pools = list(pools)
        self._pool = self._pools[device]
        self._clock = clock
        self._num_threads = num_threads
        self._to_host = to_host
        self._runners = [self._runner(number, cell) for number, cell in enumerate(self._cells)]
        self._last: list[Tensor] | None = None  # outputs of the latest task, each row after its last step; None: they
        # are in the pool alone
        self._is_whole = True  # the latest task did not fail

    def __call__(self, batch: Round) -> RoundOutput:
        """Run all tasks of ``batch``. A task that fails is run again in halves: only the rows at fault fail.

        Raises:
            Exception: what a cell raised on a device that answers later; the worker can go on with other rounds.
        """
        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        started_s = self._clock.now()
        results = []
        failed: dict[int, dict[int, Exception]] = {}
        num_computed = num_skipped = num_idle = 0
        with torch.inference_mode():
            for number, task in enumerate(batch.tasks):
                self._fetch(task)
                before, was_whole = self._last, self._is_whole
                self._last, self._is_whole = None, False  # if this task fails, nothing can go on from it
                if task.kept is not None and not was_whole:
                    raise ServingError("the task before failed, and this one goes on from it")
                runner = self._runners[task.cell]
                if runner is not None and (task.steps == 1 or runner.carries(task.carry)):
                    skipped = runner.run(task.in_rows, task.out_rows, task.lengths)
                    computed = task.num_cells - skipped
                    num_skipped += skipped
                    spec = self._cells[task.cell].spec
                    outputs = tuple(runner.results(each, task.result_steps, task.result_rows) for each in spec.results)
                    if skipped and spec.stop is not None:
                        words = outputs[spec.results.index(spec.stop.output)]
                        num_idle += task.idle_steps(words == spec.stop.value)
                else:
                    try:
                        outputs, computed = self._run(task, before)
                    except Exception:
                        if (
                            not self._pool.device.type == "cpu"
                        ):  # its results are not there yet, so none can be put together
                            raise
                        outputs, computed, failed[number] = self._run_in_halves(task, before)
                self._is_whole = True
                results.append(outputs)
                num_computed += computed
        return RoundOutput(results, started_s, self._clock.now(), num_computed, failed, num_skipped, num_idle)

    def _runner(self, number: int, cell: MaterialisedCell) -> Runner | None:
        if cell.packed is None:
            return None
        inputs, outputs = self._layout.input_banks[number], self._layout.output_banks[number]
        in_banks = [self._pool.banks[bank] for bank in inputs[: len(cell.spec.inputs)]]
        return Runner(cell.packed, in_banks, [self._pool.banks[bank] for bank in outputs[: len(cell.spec.outputs)]])

    def _run(self, task: Task, before: list[Tensor] | None) -> tuple[tuple[NDArray[np.generic], ...], int]:
        cell = self._cells[task.cell]
        sizes = _sizes(task)
        first, each = self._inputs(task, before)
        if task.steps == 1:
            inputs = [first[index] for index in range(len(cell.spec.inputs))]
            steps = [cell.run(inputs)]
            num_computed = cell.computed(task.size)
        else:
            steps, num_computed = run_steps(cell, first, each, task.carry, sizes)
        self._last = steps[-1] if task.lengths is None else _last_of_each(steps, sizes)
        if task.is_stored or self._runners[task.cell] is not None:
            rows = torch.from_numpy(np.ascontiguousarray(task.out_rows.T)).to(self._pool.device)
            for index, values in enumerate(self._last):
                self._pool.scatter(int(self._layout.output_banks[task.cell, index]), rows[index], values)
        return self._results(task, steps, cell.spec.results), num_computed

    def _run_in_halves(
        self, task: Task, before: list[Tensor] | None
    ) -> tuple[tuple[NDArray[np.generic], ...], int, dict[int, Exception]]:
        """Run ``task`` again in halves, until the rows at fault are alone; zeros stand for what they would have given.

        Nothing of the failed run is left: rows of the pool are written when all steps are computed, and a row that is
        written is read by no other row of the task.
        """
        spec = self._cells[task.cell].spec

        def run(rows: range) -> tuple[tuple[NDArray[np.generic], ...], int, list[Tensor]]:
            own = None if before is None else [values[rows.start : rows.stop] for values in before]
            outputs, computed = self._run(task.part(rows), own)
            assert self._last is not None
            return outputs, computed, self._last

        parts, failed = run_in_halves(run, task.size)
        ports = [spec.outputs[index] for index in spec.results]
        results = tuple(np.zeros((len(task.slots), *port.shape), port.dtype) for port in ports)
        last = [torch.zeros(task.size, *port.shape, dtype=torch_dtype(port.dtype)) for port in spec.outputs]
        for rows, (outputs, _, values) in parts:
            for whole, own in zip(results, outputs, strict=True):
                whole[task.gives_to(rows)] = own
            for kept, value in zip(last, values, strict=True):
                kept[rows.start : rows.stop] = value
        self._last = last
        return results, sum(computed for _, (_, computed, _) in parts), failed

    def _inputs(self, task: Task, before: list[Tensor] | None) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the first step's inputs [b, ...], and those of all steps [steps, b, ...] that the request gives."""
        first: dict[int, Tensor] = {}
        each: dict[int, Tensor] = {}
        for index in range(task.in_rows.shape[2]):
            if before is not None and task.kept is not None and task.kept[index] >= 0:
                first[index] = before[task.kept[index]]
                continue
            bank = int(self._layout.input_banks[task.cell, index])
            if task.steps == 1 or task.carry[index] >= 0:
                first[index] = self._gather(bank, task.in_rows[0, :, index])
            else:
                gathered = self._gather(bank, task.in_rows[:, :, index].reshape(-1))
                each[index] = gathered.view(task.steps, task.size, *gathered.shape[1:])
        return first, each

    def _fetch(self, task: Task) -> None:
        """Copy the rows that lie on another device to this one's pool, where they have the same numbers."""
        for index, homes in enumerate(task.homes):
            if homes is None:
                continue
            bank = int(self._layout.input_banks[task.cell, index])
            rows = task.in_rows[0, :, index] if homes.ndim == 1 else task.in_rows[:, :, index]
            for device in np.unique(homes).tolist():
                if (pool := self._pools[device]) is not self._pool:
                    at = torch.from_numpy(rows[homes == device])
                    values = pool.gather(bank, at.to(pool.device)).to(self._pool.device)
                    self._pool.scatter(bank, at.to(self._pool.device), values)

    def _gather(self, bank: int, rows: Ints) -> Tensor:
        return self._pool.gather(bank, torch.from_numpy(np.ascontiguousarray(rows)).to(self._pool.device))

    def _results(self, task: Task, steps: list[list[Tensor]], wanted: Sequence[int]) -> tuple[NDArray[np.generic], ...]:
        """Return the requests' results on the host, in the order of ``task.result_steps`` and ``result_rows``."""
        found: list[NDArray[np.generic]] = []
        for index in wanted:
            parts = []
            for step in range(task.steps):
                rows = torch.from_numpy(task.result_rows[task.result_steps == step])
                parts.append(steps[step][index].index_select(0, rows.to(self._pool.device)))
            found.append(self._to_host(parts[0] if len(parts) == 1 else torch.cat(parts)).numpy())
        return tuple(found)


def run_steps(
    cell: MaterialisedCell,
    first: dict[int, Tensor],
    each: dict[int, Tensor],
    carry: Sequence[int],
    sizes: Sequence[int],
) -> tuple[list[list[Tensor]], int]:
    """Run a chunk: in one call where the cell does several steps at once, or step by step on the same rows.

    Returns:
        Outputs by step, of the rows that have that step; and cells computed, padding included.
    """
    module = cell.module
    if isinstance(module, RunsSteps):
        steps = module.run_steps(first, each, carry, sizes)
        if steps is not None:
            return steps, sum(sizes)
    outputs: list[list[Tensor]] = []
    num_inputs = len(cell.spec.inputs)
    for step, size in enumerate(sizes):
        inputs = []
        for index in range(num_inputs):
            if index in each:
                inputs.append(each[index][step, :size])
            elif step == 0:
                inputs.append(first[index])
            else:
                inputs.append(outputs[-1][carry[index]][:size])
        outputs.append(cell.run(inputs))
    return outputs, sum(cell.computed(size) for size in sizes)


def _sizes(task: Task) -> list[int]:
    """Count the rows that have each step; rows are ordered by length, the longest first."""
    if task.lengths is None:
        return [task.size] * task.steps
    return [int(np.count_nonzero(task.lengths > step)) for step in range(task.steps)]


def _last_of_each(steps: list[list[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
    """Return the outputs after each row's last step: a row that ends earlier has them at that step."""
    following = [*sizes[1:], 0]
    return [
        torch.cat([steps[step][index][following[step] : sizes[step]] for step in reversed(range(len(sizes)))])
        for index in range(len(steps[0]))
    ]
