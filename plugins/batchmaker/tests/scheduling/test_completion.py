"""Effects of a completed round on its requests: finished ones, failed ones, and the counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mlsys_batchmaker.plan import CellGraph, Planner, Wire
from mlsys_batchmaker.scheduling.requests import CellRequest, CellResult
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_core.errors import ServingError
from mlsys_core.loop import Finished, FinishReason, WorkerId

from . import reference
from .cellular import chain, fan, layout, outputs, seq2seq, tree

OF = layout()
STOP = 9
STOPPING = layout(stop=STOP)
pytestmark = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])


def scheduler_of(compiled: bool, of=OF, **config: object) -> CellularScheduler:
    return reference.scheduler_of(of, config=SchedulerConfig(**config), compiled=compiled)  # type: ignore[arg-type]


def next_round(scheduler: CellularScheduler) -> Round:
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert batch is not None
    return batch


def run(scheduler: CellularScheduler, of=OF, **changes: object) -> list[Finished[CellResult]]:
    batch = next_round(scheduler)
    return list(scheduler.complete(batch, replace(outputs(batch, of), **changes), 5.0))  # type: ignore[arg-type]


def run_all(scheduler: CellularScheduler, of=OF, word=lambda *_: 0) -> dict[str, CellResult]:
    done: dict[str, CellResult] = {}
    while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
        for each in scheduler.complete(batch, outputs(batch, of, word=word), 5.0):
            assert each.result is not None
            done[each.request_id] = each.result
    return done


def test_results_of_another_number_of_tasks_are_refused(compiled: bool):
    scheduler = scheduler_of(compiled)
    scheduler.add(chain(OF, "a", 2), 0.0)
    with pytest.raises(ServingError, match="the worker gave results of 0 tasks for 1"):
        run(scheduler, results=[])


def test_a_row_that_fails_takes_its_request_alone(compiled: bool):
    scheduler = scheduler_of(compiled, max_tasks_to_submit=1)
    for name in "abc":
        scheduler.add(chain(OF, name, 2), 0.0)
    error = ValueError("poison")
    (left,) = run(scheduler, failed={0: {1: error}})
    assert (left.request_id, left.reason, left.error) == ("b", FinishReason.FAILED, error)
    assert scheduler.num_unfinished == 2
    batch = next_round(scheduler)
    assert batch.tasks[0].size == 2, "no other cell of it runs"
    done = scheduler.complete(batch, outputs(batch, OF), 5.0)
    assert [(each.request_id, each.reason) for each in done] == [("a", FinishReason.DONE), ("c", FinishReason.DONE)]
    assert scheduler.num_unfinished == 0
    assert scheduler._admission.room.num_held == 0
    assert not scheduler._admission.by_index


def test_a_request_fails_once_however_many_of_its_rows_do(compiled: bool):
    scheduler = scheduler_of(compiled)
    scheduler.add(tree(OF, "a", [0, 0]), 0.0)
    scheduler.add(tree(OF, "b", []), 0.0)
    first, second = ValueError("first"), ValueError("second")
    left = run(scheduler, failed={0: {0: first, 1: second}})
    assert [(each.request_id, each.reason) for each in left] == [("a", FinishReason.FAILED), ("b", FinishReason.DONE)]
    assert left[0].error is first
    assert scheduler._admission.room.num_held == 0


def test_a_failure_in_a_later_task_of_the_round(compiled: bool):
    """Several tasks in a round: the number of the task says whose row it is."""
    scheduler = scheduler_of(compiled, batching="chunk", max_tasks_to_submit=2)
    for name in "ab":
        scheduler.add(tree(OF, name, [0, 0, 0]), 0.0)
    batch = next_round(scheduler)
    assert [task.size for task in batch.tasks] == [4, 4]
    left = scheduler.complete(batch, replace(outputs(batch, OF), failed={1: {3: ValueError("no")}}), 5.0)
    assert [(each.request_id, each.reason) for each in left] == [("b", FinishReason.FAILED)]
    assert set(run_all(scheduler)) == {"a"}
    for name in "ab":
        scheduler.add(tree(OF, name, [0, 0, 0]), 0.0)
    batch = next_round(scheduler)
    failed = {0: {0: ValueError("no")}, 1: {0: ValueError("no")}}
    left = scheduler.complete(batch, replace(outputs(batch, OF), failed=failed), 5.0)
    assert [each.request_id for each in left] == ["a", "b"]


def test_a_failed_round_fails_each_request_in_it_once_and_no_other(compiled: bool):
    scheduler = scheduler_of(compiled, max_tasks_to_submit=1)
    scheduler.add(tree(OF, "a", [0]), 0.0)
    scheduler.add(tree(OF, "b", [0]), 0.0)
    scheduler.add(chain(OF, "c", 1), 0.0)
    batch = next_round(scheduler)
    error = RuntimeError("lost")
    left = scheduler.fail(batch, error, 0.0)
    assert sorted((each.request_id, each.reason, each.error) for each in left) == [
        ("a", FinishReason.FAILED, error),
        ("b", FinishReason.FAILED, error),
    ]
    assert set(run_all(scheduler)) == {"c"}
    assert scheduler._state.running == [0] * len(OF.cells)
    assert scheduler._admission.room.num_held == 0


def test_a_cancelled_request_does_not_fail_as_well(compiled: bool):
    for fails in ("round", "row"):
        scheduler = scheduler_of(compiled)
        scheduler.add(chain(OF, "a", 1), 0.0)
        batch = next_round(scheduler)
        scheduler.cancel("a", 0.0)
        assert scheduler._admission.room.num_held == 1, "its cells are in flight"
        if fails == "round":
            assert list(scheduler.fail(batch, ValueError(), 0.0)) == []
        else:
            output = replace(outputs(batch, OF), failed={0: {0: ValueError()}})
            assert list(scheduler.complete(batch, output, 0.0)) == []
        assert scheduler._admission.room.num_held == 0


@pytest.mark.parametrize(("computed", "padded"), [(None, 3), (4, 4)])
def test_cells_are_counted_with_and_without_padding(compiled: bool, computed: int | None, padded: int):
    scheduler = scheduler_of(compiled)
    for name in "abc":
        scheduler.add(chain(OF, name, 1), 0.0)
    run(scheduler, num_computed=computed)
    counters = scheduler.counters
    assert (counters.tasks, counters.cells, counters.padded_cells, counters.discarded_cells) == (1, 3, padded, 0)


def test_a_chunk_counts_its_steps(compiled: bool):
    scheduler = scheduler_of(compiled, batching="chunk", max_tasks_to_submit=4)
    for name, length in (("a", 3), ("b", 1)):
        scheduler.add(chain(OF, name, length), 0.0)
    run(scheduler)
    assert (scheduler.counters.tasks, scheduler.counters.cells, scheduler.counters.padded_cells) == (3, 4, 4)


def test_steps_after_a_stop_count_as_discarded_but_not_if_they_were_skipped(compiled: bool):
    for skipped in (0, 2):
        scheduler = scheduler_of(compiled, STOPPING, batching="chunk", max_tasks_to_submit=4)
        scheduler.add(seq2seq(STOPPING, "a", 1, 4), 0.0)
        run(scheduler, STOPPING)
        batch = next_round(scheduler)
        output = outputs(batch, STOPPING, word=lambda _, step, __: STOP if step == 1 else 0)
        (left,) = scheduler.complete(batch, replace(output, num_skipped=skipped), 5.0)
        assert left.result is not None
        assert [int(values[0]) for values in left.result.values] == [0, STOP]
        assert left.result.num_cells == 3
        assert scheduler.counters.discarded_cells == 2 - skipped
        assert scheduler.counters.cells == 5 - skipped


def test_times_are_of_the_first_task_and_of_the_end(compiled: bool):
    scheduler = scheduler_of(compiled, max_tasks_to_submit=1)
    scheduler.add(chain(OF, "a", 3), 1.0)
    for started_s in (2.0, 3.0):
        run(scheduler, started_s=started_s)
    scheduler.add(chain(OF, "b", 1), 3.5)
    done = {each.request_id: each.result for each in run(scheduler, started_s=4.0)}
    times = {name: (each.added_s, each.started_s, each.ended_s) for name, each in done.items()}
    assert times == {"a": (1.0, 2.0, 5.0), "b": (3.5, 4.0, 5.0)}
    assert done["a"].num_cells == 3


def test_values_are_heard_as_they_come_and_only_by_whom_they_are_for(compiled: bool):
    heard: list[tuple[str, int]] = []

    def listener(name: str):
        return lambda values: heard.append((name, int(values[0])))

    of = STOPPING
    scheduler = scheduler_of(compiled, of, max_tasks_to_submit=1)
    scheduler.add(seq2seq(of, "a", 1, 3, on_values=listener("a")), 0.0)
    scheduler.add(seq2seq(of, "silent", 1, 3), 0.0)
    scheduler.add(seq2seq(of, "b", 1, 3, on_values=listener("b")), 0.0)
    scheduler.add(seq2seq(of, "gone", 1, 3, on_values=listener("gone")), 0.0)
    run(scheduler, of)
    for step, expected in enumerate([[("a", 0), ("b", 2)], [("a", 10), ("b", 12)], [("a", 20), ("b", 22)]]):
        batch = next_round(scheduler)
        scheduler.cancel("gone", 0.0)  # the first time its cells are in flight
        heard.clear()
        scheduler.complete(batch, outputs(batch, of, word=lambda _, __, row, s=step: 10 * s + row), 0.0)
        assert heard == expected
    assert scheduler._state.num_streaming == 0
    assert scheduler.num_unfinished == 0


def test_nothing_is_heard_after_a_stop(compiled: bool):
    heard: list[int] = []
    scheduler = scheduler_of(compiled, STOPPING, batching="chunk", max_tasks_to_submit=5)
    request = seq2seq(STOPPING, "a", 1, 5, on_values=lambda values: heard.append(int(values[0])))
    scheduler.add(request, 0.0)
    words = [0, 3, STOP, 4, 5]
    run_all(scheduler, STOPPING, word=lambda _, step, __: words[step])
    assert heard == [0, 3, STOP]


def test_a_chain_of_several_results_of_one_task_completes_each_row_by_itself(compiled: bool):
    """Rows stop at different steps; those that do not stop go on to their ends."""
    scheduler = scheduler_of(compiled, STOPPING, batching="chunk", max_tasks_to_submit=2)
    for name in "abc":
        scheduler.add(seq2seq(STOPPING, name, 1, 4), 0.0)
    words = {"a": [STOP, 0, 0, 0], "b": [1, 2, STOP, 0], "c": [1, 2, 3, 4]}

    def word(task, step: int, row: int) -> int:
        index = int(scheduler._state.tables.sub_request[task.subs[row]])
        live = scheduler._admission.by_index[index]
        step_of_chain = int(task.nodes[row]) + step - int(scheduler._state.tables.sub_start[task.subs[row]])
        return words[live.request.request_id][step_of_chain]

    done = run_all(scheduler, STOPPING, word)
    values = {name: [int(each[0]) for each in result.values] for name, result in done.items()}
    assert values == {"a": [STOP], "b": [1, 2, STOP], "c": [1, 2, 3, 4]}
    assert {name: result.num_cells for name, result in done.items()} == {"a": 2, "b": 4, "c": 5}
    # a: its second step ran in vain; b: its fourth, in the task of its stop
    assert scheduler.counters.discarded_cells == 2
    assert scheduler._admission.room.num_held == 0


@pytest.mark.parametrize("width", [1, 3])
def test_subgraphs_that_several_wait_for(compiled: bool, width: int):
    scheduler = scheduler_of(compiled)
    scheduler.add(fan(OF, "a", width), 0.0)
    done = run_all(scheduler)
    assert len(done["a"].values) == width + 1
    assert done["a"].num_cells == fan(OF, "x", width).plan.num_nodes
    state = scheduler._state
    if isinstance(state.calls, reference.Interpreted):
        assert not state.calls.more
        assert not state.calls.sub_more
    assert state.running == [0] * len(OF.cells)


def test_requests_of_several_kinds_that_end_in_one_task(compiled: bool):
    """Results of one cell, of two, of another: each gets its own."""
    scheduler = scheduler_of(compiled)
    for name, results in (("top", ["top"]), ("both", ["leaf", "top"]), ("leaf", ["leaf"])):
        graph = CellGraph(OF)
        leaf = graph.add("leaf", {"word": 1})
        if "leaf" in results:
            graph.result(leaf)
        if "top" in results:
            graph.result(graph.add("inner", {"left": Wire(leaf, "h")}))
        scheduler.add(CellRequest(name, Planner(OF).plan(graph), graph.constants), 0.0)
    done: dict[str, list[list[float]]] = {}
    number = 0
    while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
        results_of = []
        for task in batch.tasks:
            rows = np.array([[10 * task.cell + row, number] for row in task.result_rows], dtype=np.float32)
            results_of.append((rows.reshape(-1, 2),))
        number += 1
        for each in scheduler.complete(batch, RoundOutput(results_of, 0.0, 0.0), 5.0):
            assert each.result is not None
            done[each.request_id] = [values[0].tolist() for values in each.result.values]
    leaf, inner = OF.numbers["leaf"], OF.numbers["inner"]
    assert done == {
        "top": [[10 * inner, 1]],
        "both": [[10 * leaf + 1, 0], [10 * inner + 1, 1]],
        "leaf": [[10 * leaf + 2, 0]],
    }
