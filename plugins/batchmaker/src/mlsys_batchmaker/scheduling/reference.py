"""Forming a task in NumPy: without a compiler or with several devices, and to compare ``scheduler.cpp`` with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mlsys_core.serving import WorkerId
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import COLUMNS, NEXT, SLOT, SUB, UNPINNED
from mlsys_batchmaker.plan.spec import CellSpec
from mlsys_batchmaker.scheduling.state import Ints, State
from mlsys_batchmaker.scheduling.tasks import Task

_WINDOW = 4  # ready nodes looked at for each one wanted, where some are pinned to other workers


def count_ready(state: State, cell: int, worker: WorkerId, limit: int) -> int:
    """Count the ready nodes of subgraphs that are pinned to no other worker, as far as ``limit``."""
    count = 0
    for nodes in _windows(state, cell, limit):
        count += int(np.count_nonzero(_is_open(state, nodes, worker)))
        if count >= limit:
            return limit
    return count


def _windows(state: State, cell: int, limit: int) -> Iterator[Ints]:
    """Yield the ready nodes of a cell type, window by window."""
    start = 0
    size = _WINDOW * limit
    while start < len(state.ready[cell]):
        nodes, _ = state.ready[cell].peek(start + size)
        yield nodes[start:]
        start += size


def _is_open(state: State, nodes: Ints, worker: WorkerId) -> NDArray[np.bool_]:
    """Return a mask of the nodes whose subgraph is pinned to no worker or to this one."""
    pinned = state.tables.sub_pinned[state.tables.node_fixed[nodes, SUB]]
    is_open: NDArray[np.bool_] = (pinned == UNPINNED) | (pinned == worker)
    return is_open


def _take(state: State, cell: int, worker: WorkerId, limit: int) -> tuple[Ints, Ints]:
    """Pop the first ``limit`` ready nodes that ``worker`` may take; return them and their subgraphs' ranks."""
    ready = state.ready[cell]
    if len(state.devices) == 1:
        nodes, ranks = ready.peek(limit)
        nodes, ranks = nodes.copy(), ranks.copy()
        ready.drop(len(nodes))
        return nodes, ranks
    looked, found = 0, 0
    for window in _windows(state, cell, limit):
        looked += len(window)
        found += int(np.count_nonzero(_is_open(state, window, worker)))
        if found >= limit:
            break
    nodes, ranks = ready.peek(looked)
    nodes, ranks = nodes.copy(), ranks.copy()
    is_open = _is_open(state, nodes, worker)
    taken = np.flatnonzero(is_open)[:limit]
    if not len(taken):
        return nodes[:0], ranks[:0]
    is_skipped = np.ones(int(taken[-1]) + 1, dtype=np.bool_)
    is_skipped[taken] = False
    ready.drop(len(is_skipped))
    skipped = np.flatnonzero(is_skipped)
    ready.put_back(nodes[skipped], ranks[skipped])
    return nodes[taken], ranks[taken]


def form(state: State, cell: int, worker: WorkerId, max_steps: int) -> Task | None:
    """See :func:`mlsys_batchmaker.scheduling.batching.form`."""
    tables = state.tables
    nodes, ranks = _take(state, cell, worker, state.layout.cells[cell].max_batch_size)
    if not len(nodes):
        return None
    rows = tables.node_fixed.take(nodes, axis=0)
    subs = rows[:, SUB]
    if len(state.devices) > 1:
        tables.sub_pinned[subs] = worker
    is_blind = state.is_blind(cell)
    lengths = None
    if state.config.forming == "chunk" and state.cells[cell].is_chain and not is_blind and max_steps > 1:
        lengths = np.minimum(tables.sub_end[subs] - nodes, max_steps)
    if lengths is None or lengths.max() == 1:
        task = _single_step(state, cell, worker, nodes, ranks, rows, releases=is_blind)
    else:
        task = _chunk(state, cell, worker, nodes, ranks, subs, lengths)
    state.cells[cell].last_rank = max(state.cells[cell].last_rank, int(ranks[-1]))
    return task


def _single_step(
    state: State, cell: int, worker: WorkerId, nodes: Ints, ranks: Ints, rows: Ints, *, releases: bool
) -> Task:
    subs, following = rows[:, SUB], rows[:, NEXT]
    if state.cells[cell].is_chain:  # each row is of another subgraph
        state.tables.sub_unsubmitted[subs] -= 1
    else:
        np.subtract.at(state.tables.sub_unsubmitted, subs, 1)
    if not releases:
        release_successors(state, cell, nodes, following, ranks)
    num_inputs = len(state.layout.cells[cell].inputs)
    slots = rows[:, SLOT]
    gives = (slots >= 0).nonzero()[0]
    in_rows = rows[None, :, COLUMNS : COLUMNS + num_inputs]
    steps = np.zeros(len(gives), dtype=np.int64)
    return _task(
        state, cell, worker, nodes, ranks, rows, in_rows, None, nodes, steps, gives, slots[gives], releases=releases
    )


def _chunk(state: State, cell: int, worker: WorkerId, nodes: Ints, ranks: Ints, subs: Ints, lengths: Ints) -> Task:
    """Form all steps of a round as one task: each row goes on with its chain as far as it reaches."""
    tables = state.tables
    tables.sub_unsubmitted[subs] -= lengths
    last = nodes + lengths - 1
    release_successors(state, cell, last, tables.node_fixed[last, NEXT], ranks)
    steps = int(lengths.max())
    by_length: Ints | None = None
    if int(lengths.min()) < steps:
        by_length = np.argsort(-lengths, kind="stable")
        nodes, ranks, last, by_length = nodes[by_length], ranks[by_length], last[by_length], lengths[by_length]
    grid = np.minimum(nodes + np.arange(steps)[:, None], last)  # [steps, b] nodes; beyond a row's end its last one
    fixed = tables.node_fixed[grid]
    num_inputs = len(state.layout.cells[cell].inputs)
    slots = fixed[:, :, SLOT]
    gives = slots >= 0
    if by_length is not None:
        gives &= np.arange(steps)[:, None] < by_length
    result_steps, result_rows = gives.nonzero()
    in_rows = fixed[:, :, COLUMNS : COLUMNS + num_inputs]
    return _task(
        state,
        cell,
        worker,
        nodes,
        ranks,
        fixed[-1],
        in_rows,
        by_length,
        last,
        result_steps,
        result_rows,
        slots[gives],
        releases=False,
    )


def release_successors(state: State, cell: int, nodes: Ints, following: Ints, ranks: Ints) -> None:
    """Release what waits in the same subgraphs for nothing but ``nodes`` (``UpdateNodesDependency``).

    Args:
        state: state of the manager.
        cell: cell type of all nodes.
        nodes: just submitted, ``ranks`` of their subgraphs rising.
        following: their first successors, or -1.
        ranks: ranks of the subgraphs.
    """
    tables = state.tables
    exists = following >= 0
    if not exists.all():
        following, ranks = following[exists], ranks[exists]
    if state.more:
        extra = [more for node in nodes.tolist() for more in state.more.get(node, ())]
        if extra:
            added = np.array(extra, dtype=np.int64)
            following = np.concatenate([following, added])
            ranks = np.concatenate([ranks, tables.sub_rank[tables.node_fixed[added, SUB]]])
            order = np.argsort(ranks, kind="stable")
            following, ranks = following[order], ranks[order]
    if state.cells[cell].has_joins:
        np.subtract.at(tables.node_waiting, following, 1)
        is_ready = tables.node_waiting[following] == 0
        following, ranks = following[is_ready], ranks[is_ready]
        if len(following) > 1:  # both predecessors in one task: keep the node once
            marks = -1 - np.arange(len(following))
            tables.node_waiting[following] = marks
            is_last = tables.node_waiting[following] == marks
            following, ranks = following[is_last], ranks[is_last]
    state.ready[cell].put_back(following, ranks)


def _task(
    state: State,
    cell: int,
    worker: WorkerId,
    nodes: Ints,
    ranks: Ints,
    last_rows: Ints,
    in_rows: Ints,
    lengths: Ints | None,
    last: Ints,
    result_steps: Ints,
    result_rows: Ints,
    slots: Ints,
    *,
    releases: bool,
) -> Task:
    spec = state.layout.cells[cell]
    first_output = COLUMNS + state.layout.num_inputs
    out_rows = last_rows[:, first_output : first_output + len(spec.outputs)]
    carry = state.carry[cell]
    kept = carry if carry is not None and _is_continued(state, cell, worker, nodes, ranks) else None
    if kept is None:
        state.counters.gathers += 1
    state.last_nodes[worker] = (cell, last, ranks) if state.cells[cell].is_chain else None
    no_carry = (-1,) * len(spec.inputs)
    fresh = None
    last_rank = state.cells[cell].last_rank
    if (ranks[-1] if lengths is None else ranks.max()) > last_rank:
        fresh = (ranks > last_rank).nonzero()[0]
    return Task(
        cell=cell,
        nodes=nodes,
        subs=last_rows[:, SUB],
        fresh=fresh,
        steps=len(in_rows),
        lengths=lengths,
        in_rows=in_rows,
        carry=no_carry if carry is None else carry,
        kept=kept,
        homes=no_homes(spec) if state.homes is None else _homes(state, cell, worker, in_rows, out_rows, carry, kept),
        out_rows=out_rows,
        is_stored=True,
        releases=releases,
        result_steps=result_steps,
        result_rows=result_rows,
        slots=slots,
    )


def _is_continued(state: State, cell: int, worker: WorkerId, nodes: Ints, ranks: Ints) -> bool:
    """Return whether each row goes on where the same row of the worker's task before ended."""
    before = state.last_nodes[worker]
    if before is None or before[0] != cell or len(before[1]) != len(nodes):
        return False
    # Equal ranks: the same requests, not others that were given the same numbers.
    return bool((before[1] + 1 == nodes).all() and (before[2] == ranks).all())


def no_homes(spec: CellSpec) -> tuple[None, ...]:
    """Return no devices: every row is at hand."""
    return (None,) * len(spec.inputs)


def _homes(
    state: State,
    cell: int,
    worker: WorkerId,
    in_rows: Ints,
    out_rows: Ints,
    carry: tuple[int, ...] | None,
    kept: tuple[int, ...] | None,
) -> tuple[Ints | None, ...]:
    """Return by input, where rows lie on another device, the device of each row; note where the outputs will lie.

    After unpinning, a subgraph's state still lies where it was computed: a worker elsewhere copies it (section 4.3).
    Constants lie everywhere, so later steps of a chunk read nothing from elsewhere but what its first step reads too.
    """
    assert state.homes is not None
    device = state.devices[worker]
    found: list[Ints | None] = []
    for index in range(in_rows.shape[2]):
        if kept is not None and kept[index] >= 0:
            found.append(None)
            continue
        rows = in_rows[0, :, index] if carry and carry[index] >= 0 else in_rows[:, :, index]
        homes = state.homes[state.layout.input_banks[cell, index]][rows].astype(np.int64)
        is_away = (homes >= 0) & (homes != device)
        state.counters.copied_rows += int(np.count_nonzero(is_away))
        found.append(np.where(is_away, homes, device) if is_away.any() else None)
    for index in range(out_rows.shape[1]):
        state.homes[state.layout.output_banks[cell, index]][out_rows[:, index]] = device
    return tuple(found)
