"""Look-ahead: the next packed batch is made ready while one runs, and nobody is lost, doubled or answered wrongly."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.loop import FinishReason, ServeRequest
from mlsys_core.loop.protocols import WorkerId
from mlsys_dvabatch.executors.stage_executors import StageExecutor
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import PackedPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, simulated_output
from mlsys_dvabatch.scheduling.table import Part
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel

STAGE = WorkerId(0)
COSTS = StagedModel((LinearStage(1.0, 1.0),))  # a second, and one more for each request


def scheduler(num: int, *, policy: Policy | None = None, length: int = 32, **options: Any) -> DvaScheduler:
    made = DvaScheduler(policy or PackedPolicy(max_tokens=64), COSTS, max_batch_size=4, looks_ahead=True, **options)
    for number in range(num):
        made.add(ServeRequest(str(number), None, length=length), 0.0)
    return made


def names(task: StageTask | None) -> list[str]:
    assert task is not None
    return [request.request_id for request in task.requests]


def both(made: DvaScheduler) -> tuple[StageTask, StageTask]:
    """Begin a batch and make the next ready."""
    first = made.next_batch(STAGE, 0.0)
    assert first is not None
    second = made.next_batch(STAGE, 9.0)
    assert second is not None
    return first, second


def test_the_next_batch_is_made_ready_late_and_one_only():
    made = scheduler(8)
    first = made.next_batch(STAGE, 0.0)
    assert made.next_batch(STAGE, 0.0) is None
    due_s = made.wake_at(0.0)
    assert due_s == 1.5  # half of what a batch of two takes
    assert made.next_batch(STAGE, 1.4) is None
    second = made.next_batch(STAGE, due_s)
    assert len(names(second)) == 2
    assert not set(names(first)) & set(names(second))
    assert made.next_batch(STAGE, 9.0) is None
    assert made.wake_at(2.0) is None


def test_it_begins_when_the_one_at_work_ends():
    made = scheduler(8)
    first, second = both(made)
    assert [each.request_id for each in made.complete(first, simulated_output(first), 10.0)] == names(first)
    assert made.pipeline.working == [second.part]
    assert made.wake_at(10.0) == 11.5
    third = made.next_batch(STAGE, 11.5)
    assert [each.request_id for each in made.complete(second, simulated_output(second), 12.0)] == names(second)
    assert third is not None
    assert made.pipeline.working == [third.part]


@pytest.mark.parametrize(
    ("num", "length", "policy"), [(3, 32, None), (8, 32, Policy()), (5, 8, None)], ids=["few", "plain", "short"]
)
def test_none_is_made_ready_that_others_could_join(num: int, length: int, policy: Policy | None):
    made = scheduler(num, length=length, policy=policy)
    assert made.next_batch(STAGE, 0.0) is not None
    assert made.next_batch(STAGE, 9.0) is None


def test_models_of_several_stages_do_not_look_ahead():
    two = StagedModel((LinearStage(1.0, 1.0),) * 2)
    made = DvaScheduler(PackedPolicy(max_tokens=64), two, max_batch_size=4, looks_ahead=True)
    for number in range(8):
        made.add(ServeRequest(str(number), None, length=32), 0.0)
    assert made.next_batch(STAGE, 0.0) is not None
    assert made.next_batch(STAGE, 9.0) is None


def test_who_leaves_a_batch_that_is_ready_is_told_when_it_has_run():
    made = scheduler(8)
    first, second = both(made)
    gone, stays = names(second)
    assert made.cancel(gone, 9.0) == []
    made.complete(first, simulated_output(first), 10.0)
    found = {each.request_id: each.reason for each in made.complete(second, simulated_output(second), 12.0)}
    assert found == {gone: FinishReason.CANCELLED, stays: FinishReason.DONE}


def test_a_batch_of_which_all_leave_disturbs_nobody():
    made = scheduler(8)
    first, second = both(made)
    for name in names(second):
        made.cancel(name, 9.0)
    made.complete(first, simulated_output(first), 10.0)
    third = made.next_batch(STAGE, 10.5)  # behind the one that runs for nobody
    assert third is not None
    found = made.complete(second, simulated_output(second), 12.0)
    assert {each.reason for each in found} == {FinishReason.CANCELLED}
    assert {each.reason for each in made.complete(third, simulated_output(third), 14.0)} == {FinishReason.DONE}
    assert made.num_unfinished == 2


def test_halves_of_a_batch_that_failed_run_behind_the_one_that_is_ready():
    made = scheduler(4)
    first, second = both(made)
    assert made.fail(first, ValueError("no"), 10.0) == []
    assert made.pipeline.working == [second.part]
    made.complete(second, simulated_output(second), 12.0)
    for _ in range(2):
        half = made.next_batch(STAGE, 13.0)
        assert len(names(half)) == 1
        assert half is not None
        [told] = made.fail(half, ValueError("no"), 14.0)
        assert told.reason is FinishReason.FAILED
    assert made.num_unfinished == 0


def test_an_urgent_request_waits_for_no_more_than_the_batch_that_is_ready():
    made = scheduler(8)
    first, _ = both(made)
    made.add(ServeRequest("urgent", None, length=32, priority=-1), 9.0)
    made.complete(first, simulated_output(first), 10.0)
    assert names(made.next_batch(STAGE, 12.0)) == ["urgent"]


@given(st.lists(st.tuples(st.sampled_from("acdfn"), st.integers(0, 11)), max_size=80))
def test_everybody_leaves_once(moves: list[tuple[str, int]]):
    made = scheduler(0)
    running: deque[StageTask] = deque()
    left: list[str] = []
    added = 0
    now = 0.0
    for move, number in [*moves, *[("n", 0), ("d", 0)] * 200]:
        now += 1.0
        if move == "a":
            made.add(ServeRequest(str(added), None, length=8 * (number + 1), priority=number % 2), now)
            added += 1
        elif move == "c":
            left += [each.request_id for each in made.cancel(str(number), now)]
        elif move == "n" and len(running) < 2 and (task := made.next_batch(STAGE, now)) is not None:
            running.append(task)
        elif move in "df" and running:
            task = running.popleft()
            found = (
                made.complete(task, simulated_output(task), now)
                if move == "d"
                else made.fail(task, ValueError("no"), now)
            )
            left += [each.request_id for each in found]
    assert sorted(left, key=int) == [str(number) for number in range(added)]
    assert made.num_unfinished == 0
    assert not made.pipeline.table.rows


def test_tasks_complete_in_order_though_the_second_ends_first():
    may_end = threading.Event()
    second_ended = threading.Event()

    def run(task: StageTask) -> StageOutput:
        if task.number:
            second_ended.set()
        else:
            assert second_ended.wait(600)
            assert may_end.wait(600)
        return StageOutput(results=[task.number])

    executor = StageExecutor(0, run, num_ahead=1)
    tasks = [StageTask(number, 0, 0, Part(number, 0, ("a",)), (), 1, 0, (), is_last=True) for number in range(2)]
    try:
        for task in tasks:
            executor.submit(task)
        assert second_ended.wait(600)
        assert executor.wait(0.0) is None
        may_end.set()
        assert [executor.wait(600)[1].results for _ in tasks] == [[0], [1]]  # type: ignore[index, union-attr]
    finally:
        executor.close()
