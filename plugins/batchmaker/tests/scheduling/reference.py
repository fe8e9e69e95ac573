"""Batching and completion in NumPy, as the paper has them: the oracle of ``scheduler.cpp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import (
    COLUMNS,
    END,
    NEVER,
    NEXT,
    SLOT,
    START,
    STOP,
    SUB,
    UNFINISHED,
    UNPINNED,
    UNSUBMITTED,
    WAITING,
    GraphPlan,
)
from mlsys_batchmaker.scheduling.compiled import Completed
from mlsys_batchmaker.scheduling.completion import land
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.tables import ReadyNodes, Tables
from mlsys_batchmaker.scheduling.tasks import Ints, Task
from mlsys_core.loop import WorkerId
from numpy.typing import NDArray


def scheduler_of(layout: Layout, *, compiled: bool = True, **options: Any) -> CellularScheduler:
    """Return a scheduler whose batches compiled code forms and completes, or this module."""
    scheduler = CellularScheduler(layout, **options)
    if not compiled:
        state = scheduler._state
        state.ready[:] = [Queue(cell.ready) for cell in state.cells]
        sizes = {"num_inputs": layout.num_inputs, "num_workers": len(state.devices)}
        state.calls = Interpreted(state.tables, state.cells, state.ready, **sizes)  # type: ignore[assignment]
    return scheduler


class Queue(ReadyNodes):
    """A queue of ready nodes that Python fills and empties."""

    def append(self, nodes: Ints, ranks: Ints | int) -> None:
        """Append nodes of subgraphs just released, ``ranks`` rising: behind all others."""
        if self._queue.tail + len(nodes) > self._queue.room:
            self.make_room(len(nodes))
        start = self._queue.tail
        self._queue.tail += len(nodes)
        self._nodes[start : self._queue.tail] = nodes
        self._ranks[start : self._queue.tail] = ranks

    def drop(self, count: int) -> None:
        """Forget the first ``count`` nodes."""
        self._queue.head += count

    def put_back(self, nodes: Ints, ranks: Ints) -> None:
        """Put nodes before the others, ``ranks`` rising; merge them where others rank before them."""
        if not len(nodes):
            return
        others, their_ranks = self.peek(len(self))
        if len(others) and their_ranks[0] < ranks[-1]:
            mixed = int(np.searchsorted(their_ranks, ranks[-1]))
            nodes = np.concatenate([nodes, others[:mixed]])
            ranks = np.concatenate([ranks, their_ranks[:mixed]])
            self.drop(mixed)
            order = np.argsort(ranks, kind="stable")
            nodes, ranks = nodes[order], ranks[order]
        if self._queue.head < len(nodes):
            self.make_room(len(nodes))
        end = self._queue.head
        self._queue.head -= len(nodes)
        self._nodes[self._queue.head : end] = nodes
        self._ranks[self._queue.head : end] = ranks


class Interpreted:
    """The calls of :class:`~mlsys_batchmaker.scheduling.compiled.Compiled`, to the same effect on the same memory.

    Args:
        tables: nodes and subgraphs of all live requests.
        cells: by number, each a record of ``State.cells``.
        ready: their queues.
        num_inputs: most inputs of a cell.
        num_workers: number of workers.
    """

    def __init__(
        self, tables: Tables, cells: Any, ready: Sequence[Queue], *, num_inputs: int, num_workers: int
    ) -> None:
        self._tables, self._cells, self._ready = tables, cells, ready
        self._first_output = COLUMNS + num_inputs
        self._pins = num_workers > 1
        self.more: dict[int, list[int]] = {}  # further successors of a node in its subgraph
        self.sub_more: dict[int, list[int]] = {}  # further subgraphs that wait for one
        self._admitted: dict[
            int, tuple[GraphPlan, int, int, int]
        ] = {}  # by index: starts of its nodes, subgraphs, slots
        self._last: list[tuple[int, Ints, Ints] | None] = [None] * num_workers  # by worker: of its latest task the
        # cell, and by row the last node and the rank of its subgraph; None if nothing of it can be kept

    def admit(self, plan: GraphPlan, bases: Sequence[int]) -> None:
        """See :meth:`.compiled.Compiled.admit`."""
        tables, (n, s, slot, index) = self._tables, bases[-4:]
        tables.node_fixed[n : n + plan.num_nodes] = plan.nodes + np.array(bases)[plan.node_bases]
        tables.node_waiting[n : n + plan.num_nodes] = plan.waiting
        tables.subs[s : s + plan.num_subgraphs] = plan.subs + np.array([0, n, s, index])[plan.sub_bases]
        tables.request_unfinished[index], tables.request_leaving[index] = plan.num_subgraphs, 0
        self._admitted[index] = plan, n, s, slot
        for node, successor in plan.more:
            self.more.setdefault(n + node, []).append(n + successor)
        for sub, successor in plan.sub_more:
            self.sub_more.setdefault(s + sub, []).append(s + successor)
        for sub in np.flatnonzero(plan.subs[:, WAITING] == 0).tolist():
            self._release(s + sub)

    def forget(self, plan: GraphPlan, node_start: int, sub_start: int) -> None:
        """Forget the edges of a request that has left."""
        for node, _ in plan.more:
            self.more.pop(node_start + node, None)
        for sub, _ in plan.sub_more:
            self.sub_more.pop(sub_start + sub, None)

    def _release(self, sub: int) -> None:
        """Pass a subgraph whose dependencies are satisfied to the queue of its cell type."""
        tables = self._tables
        rank, start = tables.shared.num_released, int(tables.sub_start[sub])
        tables.sub_rank[sub] = rank
        self._ready[tables.sub_cell[sub]].append(np.arange(start, start + int(tables.sub_ready[sub])), rank)
        tables.shared.num_released += 1

    def _open(self, cell: int, worker: WorkerId) -> Ints:
        """Return the indices of the ready nodes whose subgraph is pinned to no worker or to this one."""
        nodes, _ = self._ready[cell].peek(len(self._ready[cell]))
        pinned = self._tables.sub_pinned[self._tables.node_fixed[nodes, SUB]]
        return np.flatnonzero((pinned == UNPINNED) | (pinned == worker))

    def count_ready(self, cell: int, worker: WorkerId, limit: int) -> int:
        """See :func:`mlsys_batchmaker.scheduling.batching.count_ready`."""
        return min(limit, len(self._open(cell, worker)))

    def _take(self, cell: int, worker: WorkerId, limit: int) -> tuple[Ints, Ints]:
        """Pop the first ``limit`` ready nodes that ``worker`` may take; return them and their subgraphs' ranks."""
        ready, taken = self._ready[cell], self._open(cell, worker)[:limit]
        nodes, ranks = (each.copy() for each in ready.peek(int(taken.max(initial=-1)) + 1))
        ready.drop(len(nodes))
        ready.put_back(np.delete(nodes, taken), np.delete(ranks, taken))
        return nodes[taken], ranks[taken]

    def form(
        self, cell: int, worker: WorkerId, *, max_steps: int, is_blind: bool, carry: tuple[int, ...] | None
    ) -> Task | None:
        """Form a task as :func:`.batching.form` does: each row goes on with its chain for up to ``max_steps``."""
        tables, kind = self._tables, self._cells[cell]
        nodes, ranks = self._take(cell, worker, kind.max_batch)
        if not len(nodes):
            return None
        subs = tables.node_fixed[nodes, SUB]
        if self._pins:
            tables.sub_pinned[subs] = worker
        lengths = np.minimum(tables.sub_end[subs] - nodes, max_steps)
        np.subtract.at(tables.sub_unsubmitted, subs, lengths)
        if not is_blind:
            self._release_successors(cell, nodes + lengths - 1)
        steps, is_even = int(lengths.max()), lengths.min() == lengths.max()
        if not is_even:
            order = np.argsort(-lengths, kind="stable")
            nodes, ranks, subs, lengths = nodes[order], ranks[order], subs[order], lengths[order]
        last = nodes + lengths - 1
        grid = np.minimum(nodes + np.arange(steps)[:, None], last)  # [steps, b] nodes; beyond a row's end its last one
        fixed = tables.node_fixed[grid]
        slots = fixed[:, :, SLOT]
        gives = (slots >= 0) & (np.arange(steps)[:, None] < lengths)
        result_steps, result_rows = gives.nonzero()
        fresh = np.flatnonzero(ranks > kind.last_rank)
        kind.last_rank = max(kind.last_rank, int(ranks.max()))
        is_continued = self._continues(cell, worker, nodes, last, ranks)
        return Task(
            cell=cell,
            nodes=nodes,
            subs=subs,
            fresh=fresh if len(fresh) else None,
            steps=steps,
            lengths=None if is_even else lengths,
            in_rows=fixed[:, :, COLUMNS : COLUMNS + kind.num_inputs],
            carry=(-1,) * kind.num_inputs if carry is None else carry,
            kept=carry if is_continued else None,
            homes=(None,) * kind.num_inputs,
            out_rows=fixed[-1, :, self._first_output : self._first_output + kind.num_outputs],
            is_stored=True,
            releases=is_blind,
            result_steps=result_steps,
            result_rows=result_rows,
            slots=slots[gives],
        )

    def _continues(self, cell: int, worker: WorkerId, nodes: Ints, last: Ints, ranks: Ints) -> bool:
        """Return whether each row goes on where the same row of the worker's task before ended; note this one's."""
        before = self._last[worker]
        self._last[worker] = (cell, last, ranks) if self._cells[cell].is_chain else None
        if before is None or before[0] != cell:
            return False
        # Equal ranks: the same requests, not others that were given the same numbers.
        return np.array_equal(before[1] + 1, nodes) and np.array_equal(before[2], ranks)

    def lose(self, worker: WorkerId) -> None:
        """Drop the latest task of ``worker``, which failed: no task continues it."""
        self._last[worker] = None

    def _release_successors(self, cell: int, nodes: Ints) -> None:
        """Release what waits in the same subgraphs for nothing but ``nodes`` (``UpdateNodesDependency``).

        Args:
            cell: cell type of all nodes.
            nodes: just submitted, in the order of their subgraphs' release.
        """
        tables = self._tables
        following = [node for node in tables.node_fixed[nodes, NEXT].tolist() if node >= 0]
        if self.more:
            following += [other for node in nodes.tolist() for other in self.more.get(node, ())]
        if self._cells[cell].has_joins:
            following = [node for node in following if self._is_last(node)]
        released = np.array(following, dtype=np.int64)
        ranks = tables.sub_rank[tables.node_fixed[released, SUB]]
        order = np.argsort(ranks, kind="stable")
        self._ready[cell].put_back(released[order], ranks[order])

    def _is_last(self, node: int) -> bool:
        """Note that a predecessor of ``node`` was submitted; return whether there are no others."""
        self._tables.node_waiting[node] -= 1
        return not self._tables.node_waiting[node]

    def complete(self, task: Task, stop: tuple[NDArray[np.generic], int] | None) -> Completed:
        """See :meth:`.compiled.Compiled.complete`."""
        tables, subs = self._tables, task.subs
        left = land(tables, task)
        started = [] if task.fresh is None else tables.sub_request[subs[task.fresh]].tolist()
        if stop is None:
            cut: list[int] = []
            ended, num_discarded = np.unique(subs[left == 0]), 0
        else:
            ended, cut, num_discarded = self._stop(task, left, *stop)
        finished = [(self._there(index), index, *self._count_cells(index)) for index in self._end(ended)]
        slots = np.concatenate([there for there, *_ in finished]) if finished else ended[:0]
        of_finished = [[index, len(there), num_cells, flying] for there, index, num_cells, flying in finished]
        return Completed(started, cut, of_finished, slots, num_discarded)

    def _stop(self, task: Task, left: Ints, values: NDArray[np.generic], stop: int) -> tuple[Ints, list[int], int]:
        """Cut the chains that gave ``stop``, and let the others go on that waited for it.

        Returns:
            The subgraphs that ended now, the requests of chains that stopped, the cells computed in vain.
        """
        tables, subs = self._tables, task.subs
        counts = np.full(task.size, task.steps) if task.lengths is None else task.lengths
        was_over = tables.sub_stop[subs] != NEVER
        hits = np.flatnonzero((values == stop) & ~was_over[task.result_rows])
        rows = task.result_rows[hits]
        np.minimum.at(tables.sub_stop, subs[rows], task.nodes[rows] + task.result_steps[hits])
        is_over = tables.sub_stop[subs] != NEVER
        stopped = np.flatnonzero(is_over & ~was_over)
        in_vain = task.nodes[stopped] + counts[stopped] - 1 - tables.sub_stop[subs[stopped]]
        self._ready[task.cell].remove(tables.sub_rank[subs[stopped]])
        if task.releases:
            is_leaving = tables.request_leaving[tables.sub_request[subs]] != 0
            self._release_successors(task.cell, task.nodes[~is_over & (left > 0) & ~is_leaving])
        ended: Ints = subs[~was_over & (is_over | (left == 0))]
        cut: list[int] = tables.sub_request[subs[stopped]].tolist()
        return ended, cut, int(counts[was_over].sum() + in_vain.sum())

    def _end(self, ended: Ints) -> list[int]:
        """End finished subgraphs and release those that waited for them; return the requests that have no others."""
        tables = self._tables
        released, finished = [], []
        for sub in ended.tolist():
            request = int(tables.sub_request[sub])
            if tables.request_leaving[request]:
                continue
            for other in [int(tables.sub_next[sub]), *self.sub_more.get(sub, ())]:
                if other >= 0:
                    tables.sub_waiting[other] -= 1
                    released += [other] if not tables.sub_waiting[other] else []
            tables.request_unfinished[request] -= 1
            finished += [request] if not tables.request_unfinished[request] else []
        for sub in sorted(released):
            self._release(sub)
        return sorted(finished)

    def _there(self, index: int) -> Ints:
        """Return the slots of a request's results; those of a chain end with its stop."""
        plan, node_start, sub_start, first_slot = self._admitted[index]
        nodes, slots, subs, _ = plan.asked
        there: Ints = first_slot + slots[node_start + nodes <= self._tables.sub_stop[sub_start + subs]]
        return there

    def _count_cells(self, index: int) -> tuple[int, int]:
        """Return how many cells count for a request, a chain up to its stop, and whether any others are in flight."""
        plan, _, sub_start, _ = self._admitted[index]
        subs = self._tables.subs[sub_start : sub_start + plan.num_subgraphs]
        cells = np.minimum(subs[:, END], subs[:, STOP] + 1) - subs[:, START]
        return int(cells.sum()), int((subs[:, UNSUBMITTED] != subs[:, UNFINISHED]).any())
