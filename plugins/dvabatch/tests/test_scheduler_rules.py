"""The scheduler step by step: which task comes next, where its inputs are, and who leaves when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import FinishReason, QueueFullError, ServeRequest
from mlsys_core.loop.protocols import WorkerId
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, simulated_output, task_s
from mlsys_dvabatch.scheduling.table import Row
from mlsys_dvabatch.scheduling.tasks import Source, StageOutput, StageTask
from mlsys_dvabatch.stages.simulated import parse_stages

MODEL = parse_stages("1+0,1+0,1+0")


def scheduler_of(policy: Policy | None = None, costs: StageCosts = MODEL, **options: Any) -> DvaScheduler:
    return DvaScheduler(Policy() if policy is None else policy, costs, **options)


def add(scheduler: DvaScheduler, names: str, *, now: float = 0.0, **request: Any) -> None:
    for name in names:
        scheduler.add(ServeRequest(name, None, **request), now)


def task_of(scheduler: DvaScheduler, stage: int, now: float = 0.0) -> StageTask:
    task = scheduler.next_batch(WorkerId(stage), now)
    assert task is not None
    return task


def names(task: StageTask) -> str:
    return "".join(request.request_id for request in task.requests)


def run(scheduler: DvaScheduler, stage: int, **output: Any) -> list[tuple[str, FinishReason]]:
    task = task_of(scheduler, stage)
    results = [None] * task.num if task.is_last else ()
    finished = scheduler.complete(task, StageOutput(**({"results": results} | output)), 0.0)
    return [(each.request_id, each.reason) for each in finished]


def test_a_batch_goes_stage_by_stage():
    scheduler = scheduler_of()
    add(scheduler, "ab", length=3)
    add(scheduler, "c", length=5)
    first = task_of(scheduler, 0)
    assert (first.number, first.stage, first.last_stage, names(first), first.padded_length) == (0, 0, 0, "abc", 5)
    assert (first.sources, first.skips, first.drops, first.is_last, first.pair) == ((), frozenset(), (), False, 0)
    assert first.part.item == (0, 0, 3)
    assert not scheduler.complete(first, simulated_output(first), 0.0)
    second = task_of(scheduler, 1)
    assert (second.number, second.stage, second.sources, second.drops) == (1, 1, (Source(0, (0, 1, 2)),), ())
    scheduler.complete(second, simulated_output(second), 0.0)
    last = task_of(scheduler, 2)
    assert (last.sources, last.drops, last.is_last) == ((Source(1, (0, 1, 2)),), (0,), True)
    finished = scheduler.complete(last, StageOutput(results=["x", "y", "z"]), 0.0)
    assert [(each.request_id, each.reason, each.result) for each in finished] == [
        ("a", FinishReason.DONE, "x"),
        ("b", FinishReason.DONE, "y"),
        ("c", FinishReason.DONE, "z"),
    ]
    assert scheduler.num_unfinished == 0
    assert scheduler.counters == {"new": 1}
    assert (list(simulated_output(first).results), list(simulated_output(last).results)) == ([], [None] * 3)
    add(scheduler, "d")
    assert task_of(scheduler, 0).drops == (1,), "what the last stage read is needed by nobody"


def test_one_device_runs_the_later_stage_first():
    for concurrency, at_once in ((1, False), (2, True), (None, True)):
        scheduler = scheduler_of(concurrency=concurrency)
        assert scheduler.concurrency == (concurrency or 2), "one for each pair"
        add(scheduler, "a")
        run(scheduler, 0)
        add(scheduler, "b")
        assert (scheduler.next_batch(WorkerId(0), 0.0) is not None) == at_once
        assert names(task_of(scheduler, 1)) == "a"
        if not at_once:
            assert scheduler.next_batch(WorkerId(0), 0.0) is None, "the device is taken"


class Halves(Policy):
    """Splits after the first stage."""

    num_pairs = 1

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        requests = list(row.progress)
        return [requests[1:], requests[:1]] if stage == 0 else ()


def test_children_of_a_split_find_their_rows():
    scheduler = scheduler_of(Halves())
    add(scheduler, "abc")
    run(scheduler, 0)
    assert scheduler.counters["split"] == 1
    first = task_of(scheduler, 1)
    assert (names(first), first.sources, first.gathers) == ("bc", (Source(0, (1, 2)),), True)
    assert scheduler.counters["gathered rows"] == 2
    scheduler.complete(first, simulated_output(first), 0.0)
    assert scheduler.next_batch(WorkerId(1), 0.0) is None, "the second follows the first, which has not left"
    assert run(scheduler, 2) == [("b", FinishReason.DONE), ("c", FinishReason.DONE)]
    second = task_of(scheduler, 1)
    assert (names(second), second.sources) == ("a", (Source(0, (0,)),))
    assert scheduler.counters["gathered rows"] == 2, "one row from the front is no copy"
    scheduler.complete(second, simulated_output(second), 0.0)
    assert task_of(scheduler, 2).drops == (0,), "only now has everybody left the first task"


def test_a_split_of_two_of_whom_one_leaves_is_none():
    class Exits(Halves):
        wants_exits = True

    scheduler = scheduler_of(Exits())
    add(scheduler, "ab")
    assert run(scheduler, 0, exits={0: "early"}) == [("a", FinishReason.DONE)]
    assert (scheduler.counters["early exits"], scheduler.counters["split"]) == (1, 0)
    assert names(task_of(scheduler, 1)) == "b"
    three = scheduler_of(Exits())
    add(three, "abc")
    run(three, 0, exits={0: "early"})
    assert (three.counters["early exits"], three.counters["split"]) == (1, 1)


def test_a_stretch_joins_and_is_counted():
    scheduler = scheduler_of(LoadPolicy(mode="literal"), concurrency=1)
    add(scheduler, "a")
    run(scheduler, 0)
    add(scheduler, "bc")
    run(scheduler, 0)
    assert dict(scheduler.counters) == {"new": 1, "stretch": 1}
    add(scheduler, "d")
    run(scheduler, 0)
    assert dict(scheduler.counters) == {"new": 1, "stretch": 2}
    both = task_of(scheduler, 1)
    assert (names(both), both.sources, both.gathers) == (
        "abcd",
        (Source(0, (0,)), Source(1, (0, 1)), Source(2, (0,))),
        True,
    )
    assert both.padded_length == 1


class Says(Policy):
    """Answers with the same operation kind for all that waits."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        return [New(()), self.operation(state.take(9, now))]


def test_a_stretch_of_nothing_is_a_new_batch_and_new_says_whether_it_may_be_stretched():
    for operation, can_stretch in (
        (Stretch, True),
        (New, True),
        (lambda requests: New(requests, can_stretch=False), False),
    ):
        scheduler = scheduler_of(Says(operation))
        add(scheduler, "ab", now=2.0)
        assert scheduler.state.last_admission_s is None
        task_of(scheduler, 0, 2.5)
        assert dict(scheduler.counters) == {"new": 1}
        row = scheduler.pipeline.table.latest
        assert row is not None
        assert (row.can_stretch, row.created_s, scheduler.state.last_admission_s) == (can_stretch, 2.5, 2.5)


def test_skipped_stages_are_said_by_position_until_they_are_over():
    scheduler = scheduler_of(EarlyExitPolicy(mode="literal"), parse_stages("1+0,1+0,1+0,1+0"))
    add(scheduler, "abc")
    run(scheduler, 0, skip_to={1: 2, 2: 3})
    skips = []
    for stage in (1, 2, 3):
        task = task_of(scheduler, stage)
        skips.append(task.skips)
        scheduler.complete(task, simulated_output(task), 0.0)
    assert skips == [{1, 2}, {2}, frozenset()]
    assert not scheduler._skip_to


class ToTheEnd(Policy):
    def run_to(self, row: Row, stage: int, state: State) -> int:
        return 99


def test_several_stages_in_one_go_where_nobody_has_to_be_asked():
    scheduler = scheduler_of(ToTheEnd(), concurrency=1)
    add(scheduler, "ab")
    task = task_of(scheduler, 0)
    assert (task.stage, task.last_stage, task.is_last) == (0, 2, True)
    row = scheduler.pipeline.table.latest
    assert row is not None
    assert row.is_passing
    assert task_s(MODEL, task) == pytest.approx(0.003)
    finished = scheduler.complete(task, simulated_output(task), 0.0)
    assert [each.reason for each in finished] == [FinishReason.DONE] * 2
    assert not scheduler.pipeline.table.rows
    several = scheduler_of(ToTheEnd(), concurrency=2)
    add(several, "a")
    assert task_of(several, 0).last_stage == 0, "two executors work at once"

    class Looks(ToTheEnd):
        wants_exits = True

    looking = scheduler_of(Looks(), concurrency=1)
    add(looking, "a")
    assert task_of(looking, 0).last_stage == 0, "somebody may leave after it"


def test_a_run_in_which_all_were_cancelled_ends():
    scheduler = scheduler_of(ToTheEnd(), concurrency=1)
    add(scheduler, "ab")
    task = task_of(scheduler, 0)
    for name in "ab":
        assert list(scheduler.cancel(name, 0.0)) == []
        assert list(scheduler.cancel(name, 0.0)) == [], "it leaves with its stage already"
    finished = scheduler.complete(task, simulated_output(task), 0.0)
    assert [(each.request_id, each.reason, each.result) for each in finished] == [
        ("a", FinishReason.CANCELLED, None),
        ("b", FinishReason.CANCELLED, None),
    ]
    assert (scheduler.num_unfinished, scheduler.pipeline.table.rows) == (0, {})
    add(scheduler, "c")
    assert names(task_of(scheduler, 0)) == "c"


def test_a_task_that_fails_is_tried_in_halves_until_one_is_alone():
    scheduler = scheduler_of()
    add(scheduler, "abc")
    error = ValueError("no")
    assert list(scheduler.fail(task_of(scheduler, 0), error, 0.0)) == []
    assert scheduler.counters["retried parts"] == 1
    half = task_of(scheduler, 0)
    assert names(half) == "ab"
    assert not scheduler.complete(half, simulated_output(half), 0.0)
    run(scheduler, 1)
    assert run(scheduler, 2) == [("a", FinishReason.DONE), ("b", FinishReason.DONE)]
    alone = task_of(scheduler, 0)
    (left,) = scheduler.fail(alone, error, 0.0)
    assert (left.request_id, left.reason, left.error) == ("c", FinishReason.FAILED, error)
    assert (scheduler.counters["retried parts"], scheduler.num_unfinished) == (1, 0)


def test_a_cancelled_request_ends_with_the_task_that_fails():
    scheduler = scheduler_of()
    add(scheduler, "ab")
    task = task_of(scheduler, 0)
    scheduler.cancel("a", 0.0)
    (left,) = scheduler.fail(task, ValueError(), 0.0)
    assert (left.request_id, left.reason) == ("a", FinishReason.CANCELLED)
    assert names(task_of(scheduler, 0)) == "b"
    alone = scheduler_of()
    add(alone, "a")
    task = task_of(alone, 0)
    alone.cancel("a", 0.0)
    assert [each.reason for each in alone.fail(task, ValueError(), 0.0)] == [FinishReason.CANCELLED]
    assert (alone.num_unfinished, dict(alone.pipeline.table.rows)) == (0, {})


def test_results_of_another_number_are_a_fault_of_the_task():
    scheduler = scheduler_of(costs=parse_stages("1+0"))
    add(scheduler, "a")
    (left,) = scheduler.complete(task_of(scheduler, 0), StageOutput(results=[1, 2]), 0.0)
    assert left.reason is FinishReason.FAILED
    assert isinstance(left.error, ServingError)
    assert str(left.error) == "the last stage gave 2 results for 1 requests"


def test_a_result_may_fail_its_request_alone_or_come_too_late():
    scheduler = scheduler_of(costs=parse_stages("1+0"))
    add(scheduler, "a")
    add(scheduler, "b", deadline_s=1.0)
    add(scheduler, "c", deadline_s=1.001)
    error = KeyError("b")
    task = task_of(scheduler, 0)
    finished = scheduler.complete(task, StageOutput(results=[error, "late", "in time"]), 1.001)
    assert [(each.reason, each.result, each.error) for each in finished] == [
        (FinishReason.FAILED, None, error),
        (FinishReason.EXPIRED, None, None),
        (FinishReason.DONE, "in time", None),
    ]


def test_deadlines_wherever_a_request_is():
    scheduler = scheduler_of(concurrency=1)
    add(scheduler, "a", deadline_s=3.0)
    add(scheduler, "b", deadline_s=2.0)
    run(scheduler, 0)
    add(scheduler, "w", deadline_s=1.0)
    assert scheduler.wake_at(0.0) == 1.0
    assert [(each.request_id, each.reason) for each in scheduler.expire(1.0)] == [("w", FinishReason.EXPIRED)]
    assert scheduler.wake_at(1.0) == 2.0
    assert scheduler.wake_at(2.0) is None, "only what is to come"
    assert list(scheduler.expire(1.999)) == []
    assert [(each.request_id, each.reason) for each in scheduler.expire(2.0)] == [("b", FinishReason.EXPIRED)]
    task = task_of(scheduler, 1)
    assert names(task) == "a"
    assert list(scheduler.expire(3.0)) == [], "it leaves with its stage"
    assert [each.reason for each in scheduler.complete(task, simulated_output(task), 3.5)] == [FinishReason.EXPIRED]
    assert (scheduler.wake_at(4.0), scheduler.num_unfinished) == (None, 0)


def test_deadlines_of_those_who_left_are_forgotten():
    scheduler = scheduler_of(costs=parse_stages("1+0"))
    for number in range(300):
        scheduler.add(ServeRequest(str(number), None, deadline_s=1e6), 0.0)
        run(scheduler, 0)
    assert len(scheduler._deadlines) <= 65


def test_a_waiting_request_ends_at_once_and_an_unknown_one_not_at_all():
    scheduler = scheduler_of()
    add(scheduler, "a")
    assert [(each.request_id, each.reason) for each in scheduler.cancel("a", 0.0)] == [("a", FinishReason.CANCELLED)]
    assert list(scheduler.cancel("a", 0.0)) == []
    assert scheduler.num_unfinished == 0


def test_between_stages_a_cancelled_request_leaves_at_once():
    scheduler = scheduler_of(concurrency=1)
    add(scheduler, "ab")
    run(scheduler, 0)
    assert [each.reason for each in scheduler.cancel("a", 0.0)] == [FinishReason.CANCELLED]
    task = task_of(scheduler, 1)
    assert (names(task), task.sources) == ("b", (Source(0, (1,)),))


def test_an_impossible_request_is_refused():
    for options in ({"max_batch_size": 0}, {"concurrency": 0}):
        with pytest.raises(InvalidInputError, match="must be 1 or more"):
            scheduler_of(**options)
    scheduler_of(max_batch_size=1, concurrency=1)
    assert scheduler_of().state.max_batch_size == 64
    assert (len(scheduler_of(num_pairs=3).pipeline.queues), scheduler_of(num_pairs=3).concurrency) == (3, 3)
    assert (scheduler_of(Halves()).concurrency, scheduler_of(Halves(), num_pairs=2).concurrency) == (1, 2)
    scheduler = scheduler_of(max_waiting=1)
    add(scheduler, "a")
    with pytest.raises(QueueFullError):
        add(scheduler, "b")
    task_of(scheduler, 0)
    with pytest.raises(InvalidInputError, match="'a' is in a batch: ids must be unique"):
        add(scheduler, "a")
    add(scheduler, "b")
    assert scheduler.num_unfinished == 2


def test_policies_are_told_the_time():
    class Times(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.said: list[float] = []

        def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
            self.said.append(now)
            return super().admit(state, now)

        def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
            self.said.append(now)
            return ()

        def wake_at(self, state: State, now: float) -> float | None:
            self.said.append(now)
            return None

    policy = Times()
    scheduler = scheduler_of(policy)
    add(scheduler, "ab")
    task = task_of(scheduler, 0, 1.0)
    scheduler.complete(task, simulated_output(task), 2.0)
    scheduler.wake_at(3.0)
    add(scheduler, "c")
    task_of(scheduler, 0, 4.0)
    assert (policy.said, scheduler.counters["new"]) == ([1.0, 2.0, 3.0, 4.0], 2)


def test_a_drain_and_arrivals_are_told_to_the_policy():
    scheduler = scheduler_of()
    assert not scheduler.state.is_draining
    scheduler.drain(0.0)
    assert scheduler.state.is_draining
    add(scheduler, "abcdefgh")
    assert len(scheduler.state._arrivals_s) == 8

    class Wakes(Policy):
        def wake_at(self, state: State, now: float) -> float | None:
            return 5.0

    assert scheduler_of(Wakes()).wake_at(4.0) == 5.0
    assert scheduler_of(Wakes()).wake_at(5.0) is None
