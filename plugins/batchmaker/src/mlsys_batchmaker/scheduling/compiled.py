"""Batching and completion by ``scheduler.cpp``, on the tables and queues of the Python code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import ServingError
from mlsys_core.loop import WorkerId
from mlsys_core.native import Kernel, bind, expect
from numpy.typing import NDArray

from mlsys_batchmaker.plan import plan as columns_of_plans
from mlsys_batchmaker.plan.plan import GraphPlan
from mlsys_batchmaker.plan.planner import address_of
from mlsys_batchmaker.scheduling import tables
from mlsys_batchmaker.scheduling.tables import ReadyNodes
from mlsys_batchmaker.scheduling.tasks import Task

SCHEDULER = Kernel(Path(__file__).with_name("scheduler.cpp"))
_ROOM = 4096  # numbers of a task's arrays; larger tasks cost one more call
_HEADER = 7
_FINISHED = 4  # numbers of a finished request
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Completed:
    """Effects of a completed task on its requests, by their indices in the tables."""

    started: list[int]  # the first task of one of their subgraphs
    cut: list[int]  # a chain of theirs has stopped
    finished: list[list[int]]  # by request whose subgraphs are all finished: its index, the number of its results, the
    # number of its cells up to a stop, and whether others are in flight
    slots: NDArray[np.int64]  # result slots of the finished requests, one after another; valid until the next call
    num_discarded: int  # cells computed in vain


class Compiled:
    """The calls, for workers of one device.

    Args:
        library: the compiled code, see :func:`load`.
        columns: columns of the tables, a struct of the library.
        cells: by number, an array of the library's structs.
        ready: their queues.
        num_banks: banks of the state pool.
        num_workers: number of workers.
        max_batch: most rows of a task.
    """

    def __init__(
        self,
        library: Any,
        columns: Any,
        cells: Any,
        ready: Sequence[ReadyNodes],
        *,
        num_banks: int,
        num_workers: int,
        max_batch: int,
    ) -> None:
        self._library = library
        self._former = self._library.batchmaker_former()
        self._cells = cells
        self._pins = num_workers > 1
        self._columns = ctypes.addressof(columns)
        self._kept = columns
        self._addresses = [ctypes.addressof(cell) for cell in cells]
        self._widths = [(cell.num_inputs, cell.num_outputs) for cell in cells]
        self._make_room = _MAKE_ROOM(lambda cell, count: ready[cell].make_room(count))
        self._out = np.empty((2 + _FINISHED) * max_batch, dtype=np.int64)
        self._out_address = self._out.ctypes.data
        self._sizes = (c_int64 * 6)()
        self._bases = (c_int64 * (5 + num_banks))()

    def __del__(self) -> None:
        if hasattr(self, "_former"):
            self._library.batchmaker_former_free(self._former)

    def admit(self, plan: GraphPlan, bases: Sequence[int]) -> None:
        """Write a request's rows of the tables and release what waits for nothing.

        Args:
            plan: plan of the request.
            bases: starts of its rows by bank, 0, starts of its nodes, subgraphs and slots, its index.
        """
        self._bases[:] = bases  # type: ignore[call-overload]
        self._library.batchmaker_admit(
            self._columns,
            self._addresses[0],
            address_of(plan.block),
            plan.num_nodes,
            plan.num_subgraphs,
            plan.num_slots,
            self._bases,
            len(bases) - 5,
            self._make_room,
        )
        if not plan.more and not plan.sub_more:
            return
        *_, nodes, subs, _, _ = bases
        for is_sub, start, pairs in ((False, nodes, plan.more), (True, subs, plan.sub_more)):
            for before, after in pairs:
                self._library.batchmaker_add_more(self._former, is_sub, start + before, start + after)

    def forget(self, plan: GraphPlan, node_start: int, sub_start: int) -> None:
        """Forget the edges of a request that has left."""
        for is_sub, start, pairs in ((False, node_start, plan.more), (True, sub_start, plan.sub_more)):
            for before, _ in pairs:
                self._library.batchmaker_drop_more(self._former, is_sub, start + before)

    def count_ready(self, cell: int, worker: WorkerId, limit: int) -> int:
        """See :func:`mlsys_batchmaker.scheduling.batching.count_ready`."""
        count: int = self._library.batchmaker_count_ready(self._columns, self._addresses[cell], worker, limit)
        return count

    def form(
        self, cell: int, worker: WorkerId, *, max_steps: int, is_blind: bool, carry: tuple[int, ...] | None
    ) -> Task | None:
        """Form a task as :func:`.batching.form` does; ``max_steps`` is 1 for cells that do not run as a chunk."""
        memory = np.empty(_ROOM, dtype=np.int64)
        address = address_of(memory)
        at = self._columns, self._addresses[cell]
        size = self._library.batchmaker_form(
            self._former, *at, worker, self._pins, max_steps, is_blind, address, _ROOM, self._make_room
        )
        if not size:
            return None
        if size > _ROOM:
            memory = np.empty(size, dtype=np.int64)
            address = address_of(memory)
            self._library.batchmaker_write(self._former, *at, address)
        rows, steps, num_results, num_fresh, has_lengths, is_continued, _ = memory[:_HEADER].tolist()
        num_inputs, num_outputs = self._widths[cell]
        subs = _HEADER + rows
        fresh = subs + rows
        lengths = fresh + num_fresh
        results = lengths + rows * has_lengths
        inputs = results + 3 * num_results
        outputs = inputs + steps * rows * num_inputs
        return Task(
            cell,
            memory[_HEADER:subs],
            memory[subs:fresh],
            memory[fresh:lengths] if num_fresh else None,
            steps,
            memory[lengths:results] if has_lengths else None,
            memory[inputs:outputs].reshape(steps, rows, num_inputs),
            (-1,) * num_inputs if carry is None else carry,
            carry if is_continued else None,
            (None,) * num_inputs,
            memory[outputs:size].reshape(rows, num_outputs),
            True,
            is_blind,
            memory[results : results + num_results],
            memory[results + num_results : results + 2 * num_results],
            memory[results + 2 * num_results : inputs],
            address,
        )

    def lose(self, worker: WorkerId) -> None:
        """Drop the latest task of ``worker``, which failed: no task continues it."""
        self._library.batchmaker_lose(self._former, worker)

    def complete(self, task: Task, stop: tuple[NDArray[np.generic], int] | None) -> Completed:
        """Release what the completed ``task``, formed here, held.

        Args:
            task: the completed task.
            stop: the results that may stop its chains, and the value that does.

        Raises:
            ServingError: there are more results or fewer than were asked for.
        """
        given: tuple[int | None, int] = (None, 0)
        if stop is not None:
            values = np.ascontiguousarray(stop[0], dtype=np.int64)
            if len(values) != len(task.slots):
                raise ServingError(f"the worker gave {len(values)} results of a task for {len(task.slots)}")
            given = address_of(values), stop[1]
        self._library.batchmaker_settle(
            self._former,
            self._columns,
            self._addresses[0],
            task.cell,
            task.address,
            self._pins,
            task.releases,
            *given,
            self._out_address,
            self._sizes,
            self._make_room,
        )
        started, cut, finished, num_discarded, num_there, there = self._sizes
        found = self._out[: started + cut].tolist()
        if not finished:
            return Completed(found[:started], found[started:], [], _NONE, num_discarded)
        of_finished = self._out[started + cut : started + cut + _FINISHED * finished].reshape(finished, _FINISHED)
        slots = _NONE
        if num_there:
            slots = np.frombuffer((c_int64 * num_there).from_address(there), dtype=np.int64)  # type: ignore[call-overload]
        return Completed(found[:started], found[started:], of_finished.tolist(), slots, num_discarded)


_MAKE_ROOM = CFUNCTYPE(None, c_int64, c_int64)


@cache
def load() -> Any:
    """Load the library; the first call ever compiles it for this machine.

    Raises:
        KernelUnavailableError: the wheel has no library for this processor, and there is no C++ compiler.
    """
    kernel = SCHEDULER.load()
    # Calls of a microsecond keep the interpreter's lock.
    library = bind(ctypes.PyDLL(kernel._name, handle=kernel._handle), by_address=True)
    known = {**vars(columns_of_plans), **vars(tables)}
    expect(library, **{name: known[name] for name in library.constants})
    return library
