"""Effects of a completed task: results, stops, unpinning, finished subgraphs and requests (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from mlsys_core.errors import ServingError
from mlsys_core.loop import Finished, FinishReason
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import UNPINNED
from mlsys_batchmaker.scheduling.admission import Admission
from mlsys_batchmaker.scheduling.compiled import Completed
from mlsys_batchmaker.scheduling.requests import CellResult, Earlier, Live, Values
from mlsys_batchmaker.scheduling.state import State
from mlsys_batchmaker.scheduling.tables import Tables
from mlsys_batchmaker.scheduling.tasks import Ints, Round, RoundOutput, Task


def update_from_output(
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
        finished += _complete_task(state, admission, task, results, output.started_s, now)
    num_cells = sum(task.num_cells for task in batch.tasks)
    state.counters.padded_cells += num_cells if output.num_computed is None else output.num_computed
    state.counters.tasks -= output.num_idle
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
    state.calls.lose(batch.worker)
    lost: dict[int, Live] = {}
    for task in batch.tasks:
        land(state.tables, task)
        state.running[task.cell] -= 1
        for index in set(state.tables.sub_request[task.subs].tolist()):
            live = admission.by_index[index]
            if live.reason is None:
                lost[index] = live
    for live in lost.values():
        admission.leave(live, FinishReason.FAILED)
    admission.free_what_left()
    return [Finished(live.request.request_id, FinishReason.FAILED, error=error) for live in lost.values()]


def land(tables: Tables, task: Task) -> Ints:
    """Note that nothing of ``task`` is in flight; return the nodes that each row's subgraph has left, [b].

    Subgraphs without other nodes in flight are unpinned.
    """
    subs = task.subs
    np.subtract.at(tables.sub_unfinished, subs, task.steps if task.lengths is None else task.lengths)
    left: Ints = tables.sub_unfinished[subs]
    tables.sub_pinned[subs[left == tables.sub_unsubmitted[subs]]] = UNPINNED
    return left


def _complete_task(
    state: State,
    admission: Admission,
    task: Task,
    results: tuple[NDArray[np.generic], ...],
    started_s: float,
    now: float,
) -> list[Finished[CellResult]]:
    state.counters.tasks += task.steps
    state.counters.cells += task.num_cells
    spec = state.layout.cells[task.cell]
    stop = None if spec.stop is None else (results[spec.results.index(spec.stop.output)], spec.stop.value)
    completed = state.calls.complete(task, stop)
    state.running[task.cell] -= 1
    state.counters.discarded_cells += completed.num_discarded
    _note_started(admission, completed.started, started_s)
    for index in completed.cut:
        admission.by_index[index].is_cut = True
    _hand_out(state, admission, task, results, None if spec.stop is None else state.tables.sub_stop)
    return _end_finished(state, admission, completed, now) if completed.finished else []


def _note_started(admission: Admission, requests: Iterable[int], started_s: float) -> None:
    """Note the start of requests whose first cells these may be."""
    for index in requests:
        live = admission.by_index[index]
        if live.started_s is None:
            live.started_s = started_s


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
    for index in is_known.nonzero()[0].tolist():
        live = admission.by_index[int(state.tables.sub_request[owners[index]])]
        if live.reason is None and live.request.on_values is not None:
            live.request.on_values(tuple(column[index] for column in results))


def _end_finished(state: State, admission: Admission, completed: Completed, now: float) -> list[Finished[CellResult]]:
    """End the requests whose subgraphs are all finished."""
    lives = [admission.by_index[index] for index, *_ in completed.finished]
    cells = {live.request.plan.result_cell for live in lives}
    if len(cells) == 1 and None not in cells:
        (cell,) = cells
        assert cell is not None
        values = state.results.read_several(cell, completed.slots, [count for _, count, _, _ in completed.finished])
    else:
        values = [state.results.read(live.request.plan, live.first_slot, _is_there(state, live)) for live in lives]
    done = [
        _end_request(admission, live, own, num_cells, bool(is_in_flight), now)
        for live, own, (_, _, num_cells, is_in_flight) in zip(lives, values, completed.finished, strict=True)
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
