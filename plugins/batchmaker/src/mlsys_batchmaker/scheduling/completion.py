"""Effects of a completed task: results, stops, unpinning, finished subgraphs and requests (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from mlsys_core.errors import ServingError
from mlsys_core.serving import Finished, FinishReason
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import END, NEVER, NEXT, START, STOP, UNPINNED
from mlsys_batchmaker.scheduling.admission import Admission
from mlsys_batchmaker.scheduling.compiled import Compiled, Settled
from mlsys_batchmaker.scheduling.reference import release_successors
from mlsys_batchmaker.scheduling.requests import CellResult, Earlier, Live, Values
from mlsys_batchmaker.scheduling.state import Ints, State
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput, Task


def settle(
    state: State, admission: Admission, batch: Round, output: RoundOutput, now: float
) -> list[Finished[CellResult]]:
    """Take the output of a round; returns the requests that are done by it.

    Raises:
        ServingError: the worker gave results for another number of tasks.
    """
    if len(output.results) != len(batch.tasks):
        raise ServingError(f"the worker gave results of {len(output.results)} tasks for {len(batch.tasks)}")
    finished: list[Finished[CellResult]] = []
    for number, (task, results) in enumerate(zip(batch.tasks, output.results, strict=True)):
        if number in output.failed:
            finished += _fail_rows(state, admission, task, output.failed[number])
        finished += _settle_task(state, admission, task, results, output.started_s, now)
    num_cells = sum(task.num_cells for task in batch.tasks)
    state.counters.padded_cells += num_cells if output.num_computed is None else output.num_computed
    state.counters.cells -= output.num_skipped
    state.counters.discarded_cells -= output.num_skipped
    admission.free_what_left()
    return finished


def _fail_rows(
    state: State, admission: Admission, task: Task, failed: Mapping[int, Exception]
) -> list[Finished[CellResult]]:
    """Let requests leave whose rows failed; their other cells in flight, this task's too, are computed in vain."""
    finished: list[Finished[CellResult]] = []
    for row, error in failed.items():
        live = admission.by_index[int(state.tables.sub_request[task.subs[row]])]
        if live.reason is None:
            admission.leave(live, FinishReason.FAILED)
            finished.append(Finished(live.request.request_id, FinishReason.FAILED, error=error))
    return finished


def give_up(state: State, admission: Admission, batch: Round, error: BaseException) -> list[Finished[CellResult]]:
    """Let every request leave with ``error`` that had a cell in this failed round."""
    state.last_nodes[batch.worker] = None
    if state.compiled is not None:
        state.compiled.lose(batch.worker)
    lost: dict[int, Live] = {}
    for task in batch.tasks:
        _land(state, task)
        for index in set(state.tables.sub_request[task.subs].tolist()):
            live = admission.by_index[index]
            if live.reason is None:
                lost[index] = live
    for live in lost.values():
        admission.leave(live, FinishReason.FAILED)
    admission.free_what_left()
    return [Finished(live.request.request_id, FinishReason.FAILED, error=error) for live in lost.values()]


def _land(state: State, task: Task) -> Ints:
    """Note that nothing of ``task`` is in flight; return the nodes that each row's subgraph has left, [b].

    Subgraphs without other nodes in flight are unpinned.
    """
    tables, subs = state.tables, task.subs
    counts = task.steps if task.lengths is None else task.lengths
    if state.cells[task.cell].is_chain:  # each row is of another subgraph
        left: Ints = tables.sub_unfinished[subs] - counts
        tables.sub_unfinished[subs] = left
    else:
        np.subtract.at(tables.sub_unfinished, subs, counts)
        left = tables.sub_unfinished[subs]
    if len(state.devices) > 1:
        tables.sub_pinned[subs[left == tables.sub_unsubmitted[subs]]] = UNPINNED
    state.running[task.cell] -= 1
    return left


def _settle_task(
    state: State,
    admission: Admission,
    task: Task,
    results: tuple[NDArray[np.generic], ...],
    started_s: float,
    now: float,
) -> list[Finished[CellResult]]:
    state.counters.tasks += task.steps
    state.counters.cells += task.num_cells
    if state.compiled is not None:
        return _settle_compiled(state, state.compiled, admission, task, results, started_s, now)
    left = _land(state, task)
    if task.fresh is not None:
        _note_started(admission, state.tables.sub_request[task.subs[task.fresh]].tolist(), started_s)
    if state.layout.cells[task.cell].stop is not None:
        ended = _settle_stopping(state, admission, task, results, left)
    else:
        _hand_out(state, admission, task, results, None)
        ended = task.subs[left == 0]
        if len(ended) > 1 and not state.cells[task.cell].is_chain:
            ended = np.unique(ended)
    return _end_subgraphs(state, admission, ended, now) if len(ended) else []


def _settle_compiled(
    state: State,
    compiled: Compiled,
    admission: Admission,
    task: Task,
    results: tuple[NDArray[np.generic], ...],
    started_s: float,
    now: float,
) -> list[Finished[CellResult]]:
    """Settle the task in one compiled call, to the effect of the other functions of this file."""
    spec = state.layout.cells[task.cell]
    stop = None if spec.stop is None else (results[spec.results.index(spec.stop.output)], spec.stop.value)
    settled = compiled.settle(task, stop)
    state.running[task.cell] -= 1
    state.counters.discarded_cells += settled.num_discarded
    _note_started(admission, settled.started, started_s)
    for index in settled.cut:
        admission.by_index[index].is_cut = True
    _hand_out(state, admission, task, results, None if spec.stop is None else state.tables.sub_stop)
    return _end_settled(state, admission, settled, now) if settled.finished else []


def _note_started(admission: Admission, requests: Iterable[int], started_s: float) -> None:
    """Note the start of requests whose first cells these may be."""
    for index in requests:
        live = admission.by_index[index]
        if live.started_s is None:
            live.started_s = started_s


def _settle_stopping(
    state: State, admission: Admission, task: Task, results: tuple[NDArray[np.generic], ...], left: Ints
) -> Ints:
    """Settle a task of a cell whose chains may stop; return the subgraphs that ended now."""
    spec, tables, subs = state.layout.cells[task.cell], state.tables, task.subs
    assert spec.stop is not None
    counts = np.full(task.size, task.steps) if task.lengths is None else task.lengths
    was_over = tables.sub_stop[subs] != NEVER
    hits = np.flatnonzero(results[spec.results.index(spec.stop.output)] == spec.stop.value)
    rows = task.result_rows[hits]
    fresh = ~was_over[rows]
    hits, rows = hits[fresh], rows[fresh]
    np.minimum.at(tables.sub_stop, subs[rows], task.nodes[rows] + task.result_steps[hits])
    _hand_out(state, admission, task, results, tables.sub_stop)
    is_over = tables.sub_stop[subs] != NEVER
    stopped = np.flatnonzero(is_over & ~was_over)
    in_vain = task.nodes[stopped] + counts[stopped] - 1 - tables.sub_stop[subs[stopped]]
    state.counters.discarded_cells += int(counts[was_over].sum() + in_vain.sum())
    if len(stopped):
        for index in tables.sub_request[subs[stopped]].tolist():
            admission.by_index[index].is_cut = True
        state.ready[task.cell].remove(tables.sub_rank[subs[stopped]])
    if task.releases:
        goes_on = ~is_over & (left > 0)
        goes_on &= tables.request_leaving[tables.sub_request[subs]] == 0
        nodes = task.nodes[goes_on]
        release_successors(state, task.cell, nodes, tables.node_fixed[nodes, NEXT], tables.sub_rank[subs[goes_on]])
    ended: Ints = subs[~was_over & (is_over | (left == 0))]
    return ended


def _hand_out(
    state: State, admission: Admission, task: Task, results: tuple[NDArray[np.generic], ...], stops: Ints | None
) -> None:
    """Keep what the nodes gave, and tell who listens; with ``stops``, up to where each chain stopped."""
    if not len(task.slots):
        return
    state.results.write(task.cell, task.slots, results)
    if not state.num_streaming:
        return
    nodes, owners = task.nodes[task.result_rows] + task.result_steps, task.subs[task.result_rows]
    is_known = nodes >= 0 if stops is None else nodes <= stops[owners]
    for place in is_known.nonzero()[0].tolist():
        live = admission.by_index[int(state.tables.sub_request[owners[place]])]
        if live.reason is None and live.request.on_values is not None:
            live.request.on_values(tuple(column[place] for column in results))


def _end_subgraphs(state: State, admission: Admission, ended: Ints, now: float) -> list[Finished[CellResult]]:
    """End finished subgraphs: release those that waited for them, and let requests go that have no others."""
    tables = state.tables
    owners = tables.sub_request[ended]
    here = tables.request_leaving[owners] == 0
    ended, owners = ended[here], owners[here]
    following = tables.sub_next[ended]
    following = following[following >= 0]
    if state.sub_more:
        more = [other for sub in ended.tolist() for other in state.sub_more.get(sub, ())]
        following = np.concatenate([following, np.array(more, dtype=np.int64)])
    if len(following):
        np.subtract.at(tables.sub_waiting, following, 1)
        for sub in sorted(set(following[tables.sub_waiting[following] == 0].tolist())):
            state.release(sub)
    np.subtract.at(tables.request_unfinished, owners, 1)
    return _end_requests(state, admission, sorted(set(owners[tables.request_unfinished[owners] == 0].tolist())), now)


def _end_requests(state: State, admission: Admission, indices: list[int], now: float) -> list[Finished[CellResult]]:
    lives = [admission.by_index[index] for index in indices]
    done = []
    for live in lives:
        values = state.results.read(live.request.plan, live.first_slot, _is_there(state, live))
        is_in_flight = live.is_cut and admission.is_in_flight(live)
        done.append(_end_request(admission, live, values, _num_cells(state, live), is_in_flight, now))
    return [each for each in done if each is not None]


def _end_settled(state: State, admission: Admission, settled: Settled, now: float) -> list[Finished[CellResult]]:
    """End the requests that compiled code found finished, as :func:`_end_requests` does."""
    lives = [admission.by_index[index] for index, *_ in settled.finished]
    cells = {live.request.plan.result_cell for live in lives}
    if len(cells) == 1 and None not in cells:
        (cell,) = cells
        assert cell is not None
        values = state.results.read_several(cell, settled.slots, [count for _, count, _, _ in settled.finished])
    else:
        values = [state.results.read(live.request.plan, live.first_slot, _is_there(state, live)) for live in lives]
    done = [
        _end_request(admission, live, own, num_cells, bool(is_in_flight), now)
        for live, own, (_, _, num_cells, is_in_flight) in zip(lives, values, settled.finished, strict=True)
    ]
    return [each for each in done if each is not None]


def _end_request(
    admission: Admission, live: Live, values: list[Values], num_cells: int, is_in_flight: bool, now: float
) -> Finished[CellResult] | None:
    """End a part of ``live``, whose cells are all computed: it goes on with its next part (None), or is done.

    Args:
        admission: holder of the request.
        live: the request.
        values: results of these cells.
        num_cells: that count.
        is_in_flight: some of its cells run in vain.
        now: seconds of the loop's clock.
    """
    request = live.request
    live.num_cells = num_cells
    earlier = request.earlier
    if earlier is not None:
        live.num_cells += earlier.num_cells
    if request.grow is not None:
        parts = (*(earlier.values if earlier is not None else ()), values)
        try:
            following = request.grow(parts)
            if following is not None:
                so_far = Earlier(parts, live.num_cells, live.added_s, live.started_s)
                admission.go_on(
                    live, is_in_flight, replace(request, plan=following[0], constants=following[1], earlier=so_far)
                )
                return None
        except Exception as error:  # noqa: BLE001 - a request boundary: it cannot go on, others do
            admission.finish(live, is_in_flight)
            return Finished(request.request_id, FinishReason.FAILED, error=error)
        values = [each for part in parts for each in part]
    admission.finish(live, is_in_flight)
    return Finished(request.request_id, FinishReason.DONE, live.result(values, now))


def _is_there(state: State, live: Live) -> NDArray[np.bool_] | None:
    """Return a mask of the results that there are: a chain that stopped has none after its stop; None for all."""
    if not live.is_cut:
        return None
    plan = live.request.plan
    asked = plan.asked
    stops = state.tables.sub_stop[live.sub_start + asked[2]]
    is_there: NDArray[np.bool_] = live.node_start + asked[0] <= stops
    return is_there


def _num_cells(state: State, live: Live) -> int:
    """Count the cells of ``live``: all of its nodes, but of a chain that stopped only those up to the stop."""
    if not live.is_cut:
        return live.request.plan.num_nodes
    subs = state.tables.subs[live.sub_start : live.sub_start + live.request.plan.num_subgraphs].tolist()
    return sum(min(sub[END], sub[STOP] + 1) - sub[START] for sub in subs)
