"""Messages from the scheduler to a worker and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from mlsys_core.loop import WorkerId
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Task:
    """Cells of one type that run as one batch, for one step or, if they are chains, for several.

    Not frozen, as that would cost more than half of the batching time: only batching sets ``is_stored``, at once.
    """

    cell: int  # number of the cell type
    nodes: Ints  # [b] each row's first node
    subs: Ints  # [b] their subgraphs
    fresh: Ints | None  # rows whose subgraph begins with this task; None: none does
    steps: int  # steps of the longest row
    lengths: Ints | None  # [b] steps of each row, never rising; None: all have ``steps``
    in_rows: Ints  # [steps, b, num_inputs] rows to read; of a carried input only step 0 counts
    carry: tuple[int, ...]  # carry[i]: the previous step's output that feeds input i (steps >= 1); -1: none
    kept: tuple[int, ...] | None  # kept[i]: the output of this worker's previous task that holds input i, in the same
    # order of rows; -1: none; None: the set of requests changed, so all inputs are gathered
    homes: tuple[Ints | None, ...]  # by input: where some rows lie on another device, the device of each, [b]
    out_rows: Ints  # [b, num_outputs] rows to write, after each row's last step
    is_stored: bool  # False: the next task keeps all outputs, so they need not be written
    releases: bool  # its rows' successors become ready when it is completed, not already now
    result_steps: Ints  # [r] where a request gets the results: the step ...
    result_rows: Ints  # [r] ... and the row of the batch
    slots: Ints  # [r] where the manager keeps them
    address: int = 0  # address of all its arrays in one, as scheduler.cpp formed it; 0: a part of a task

    @property
    def size(self) -> int:
        """Rows, without padding."""
        return len(self.nodes)

    @property
    def num_cells(self) -> int:
        """Cells computed, without padding."""
        return len(self.nodes) * self.steps if self.lengths is None else int(self.lengths.sum())

    def idle_steps(self, is_stop: NDArray[np.bool_]) -> int:
        """Return the steps at the end in which no row is computed, as all have stopped.

        Args:
            is_stop: By result, whether it stops its row.
        """
        computed = np.full(self.size, self.steps) if self.lengths is None else self.lengths.copy()
        np.minimum.at(computed, self.result_rows[is_stop], self.result_steps[is_stop] + 1)
        return self.steps - int(computed.max())

    def part(self, rows: range) -> Task:
        """Return the task of some of the rows alone, and of no results but theirs."""
        own = slice(rows.start, rows.stop)
        lengths = None if self.lengths is None else self.lengths[own]
        steps = self.steps if lengths is None else int(lengths[0])
        chosen = self.gives_to(rows)
        return replace(
            self,
            nodes=self.nodes[own],
            subs=self.subs[own],
            fresh=None,
            steps=steps,
            lengths=lengths,
            in_rows=self.in_rows[:steps, own],
            homes=(),  # all rows are here: the whole task has run
            out_rows=self.out_rows[own],
            result_steps=self.result_steps[chosen],
            result_rows=self.result_rows[chosen] - rows.start,
            slots=self.slots[chosen],
            address=0,
        )

    def gives_to(self, rows: range) -> NDArray[np.bool_]:
        """Return, by result, whether it is one of ``rows``."""
        chosen: NDArray[np.bool_] = (self.result_rows >= rows.start) & (self.result_rows < rows.stop)
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Work for one worker: a single task, or all that one call of Schedule formed. The loop's batch."""

    worker: WorkerId
    tasks: tuple[Task, ...]  # at least one; run in this order


@dataclass(frozen=True, slots=True, eq=False)
class RoundOutput:
    """Results of a round."""

    results: Sequence[tuple[NDArray[np.generic], ...]]  # by task, by ``CellSpec.results``: [r, *shape]
    started_s: float  # on the loop's clock
    ended_s: float
    num_computed: int | None = None  # cells computed, padding included; None: nothing was padded
    failed: Mapping[int, Mapping[int, Exception]] = field(default_factory=dict)  # task -> row -> its fault; other rows
    # of the task are computed, and its results are zeros
    num_skipped: int = 0  # cells of the tasks that were not computed, because their chain had stopped in the same task
    num_idle: int = 0  # steps of the tasks in which nothing was computed, because all their chains had stopped
