"""The scheduler under core's loop in virtual time: Figure 3, isolation, cancellation, deadlines, early exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.loop import FinishReason, ServeRequest, SimulatedExecutor, Simulation, simulate
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_core.loop.protocols import WorkerId
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy, LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, simulated_output, task_s
from mlsys_dvabatch.scheduling.table import Row
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel, parse_stages

UNIT = StagedModel((LinearStage(1.0, 0.0),) * 4)  # every operator takes 1 T, whatever the batch


def serve(
    policy: Policy,
    costs: StageCosts,
    trace: Sequence[tuple[float, ServeRequest[Any]]],
    *,
    output: Any = simulated_output,
    cancellations: Sequence[tuple[float, str]] = (),
    **options: Any,
) -> tuple[Simulation[StageTask], DvaScheduler]:
    def cost(task: StageTask) -> float:
        return task_s(costs, task)

    scheduler = DvaScheduler(policy, costs, **options)
    workers = [SimulatedExecutor(cost, output) for _ in range(costs.num_stages)]
    return simulate(scheduler, workers, trace, cancellations=cancellations), scheduler


def mean_s(run: Simulation[Any]) -> float:
    return sum(served.latency_s for served in run.requests) / len(run.requests)


def arrivals(*times_s: float, lengths: Sequence[int] = ()) -> list[tuple[float, ServeRequest[Any]]]:
    lengths = lengths or [1] * len(times_s)
    return [
        (at, ServeRequest(str(number), None, length=length))
        for number, (at, length) in enumerate(zip(times_s, lengths, strict=True), 1)
    ]


class ByWork:
    """Figure 3, Case I: an operator takes 1 T for four requests of full length, and no less than half of that."""

    num_stages = 4

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return max(0.5, num * length / 16)


def test_figure_3_case_i_input_diversity():
    """Three short requests and a long one: 4 T in one batch, 2.5 T in two, the short ones first."""
    trace = arrivals(0, 0, 0, 0, lengths=[2, 2, 2, 4])
    whole = SimulatedExecutor(
        lambda batch: 4 * ByWork().stage_s(0, batch.size, batch.padded_length), lambda batch: [None] * batch.size
    )
    assert mean_s(simulate(ZeroBatch(max_batch_size=4), whole, trace)) == 4.0
    for policy in (InputPolicy(), InputPolicy(mode="literal", bounds=(2, 4))):
        run, _ = serve(policy, ByWork(), trace, max_batch_size=4, concurrency=1)
        assert [run[str(n)].latency_s for n in (1, 2, 3, 4)] == [2, 2, 2, 4]
        assert mean_s(run) == 2.5


class _AllSingles(Policy):
    """Case II's schedule: batch for the first operator, then one by one."""

    num_pairs = 1

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        return [[request] for request in row.progress] if stage == 0 else ()


def test_figure_3_case_ii_operator_diversity():
    """A prefers 4; B, C and D prefer 1, so a batch of 4 takes them four times as long as one: 4 T against 2.875 T."""
    model = parse_stages("1000+0,0+250,0+250,0+250")  # in ms: 1 T for A; for 4 requests 1 T for each of B, C, D
    trace = arrivals(0, 0, 0, 0)
    whole = SimulatedExecutor(lambda batch: model.seconds(batch.size), lambda batch: [None] * batch.size)
    assert mean_s(simulate(ZeroBatch(max_batch_size=4), whole, trace)) == pytest.approx(4.0)
    run, _ = serve(_AllSingles(), model, trace)
    assert [run[str(n)].latency_s for n in (1, 2, 3, 4)] == pytest.approx([1.75, 2.5, 3.25, 4.0])
    assert mean_s(run) == pytest.approx(2.875)
    halved, scheduler = serve(OperatorPolicy(mode="literal"), model, trace)
    assert [halved[str(n)].latency_s for n in (1, 2, 3, 4)] == pytest.approx([2.0, 2.5, 3.5, 4.0])
    assert scheduler.counters["split"] == 3  # 4 into 2 and 2 after A, each again after B
    by_cost, _ = serve(OperatorPolicy(), model, trace)
    assert mean_s(by_cost) == pytest.approx(2.875)


class _Window(LoadPolicy):
    """A window of 4 T before a new batch, as Case III has it."""

    def begin(self, state: State, now: float) -> Sequence[New | Stretch]:
        oldest_s = state.oldest_s
        return super().begin(state, now) if oldest_s is not None and now >= oldest_s + 4 else ()

    def wake_at(self, state: State, now: float) -> float | None:
        return None if state.oldest_s is None else state.oldest_s + 4


def test_figure_3_case_iii_load_diversity():
    """A window of 4 T; request 1 starts at 4 T, three more come when it has passed A: 8 T against 5.25 T."""
    trace = arrivals(0, 5, 5, 5)
    run, scheduler = serve(_Window(mode="literal", comp_wait_s=100), UNIT, trace)
    assert [run[str(n)].latency_s for n in (1, 2, 3, 4)] == [9, 4, 4, 4]
    assert mean_s(run) == 5.25
    assert (scheduler.counters["new"], scheduler.counters["stretch"]) == (1, 1)
    alone, _ = serve(_Window(mode="literal", comp_wait_s=0), UNIT, trace, num_pairs=1)
    assert mean_s(alone) == 8.0


@pytest.mark.parametrize(
    ("stages_ms", "load_gain"), [("6+0.05,6+0.05,6+0.05,6+0.05", 0.99), ("0.2+2,0.2+2,0.2+2,0.2+2", 1.0)]
)
def test_a_stretch_that_does_not_pay_is_not_made(stages_ms: str, load_gain: float):
    """One early request, one that comes late in its last but one stage: joining would hold the first for long."""
    model = parse_stages(stages_ms)
    late_s = model.seconds(1) * 0.70
    trace = arrivals(0, late_s)
    by_cost, _ = serve(LoadPolicy(comp_wait_s=100), model, trace, concurrency=1)
    literal, scheduler = serve(LoadPolicy(mode="literal", comp_wait_s=100), model, trace, concurrency=1)
    assert scheduler.counters["stretch"] == 1
    assert mean_s(by_cost) <= mean_s(literal) * load_gain


def test_a_batch_older_than_comp_wait_is_not_stretched():
    run, scheduler = serve(LoadPolicy(mode="literal", comp_wait_s=0.5), UNIT, arrivals(0, 1.5), concurrency=1)
    assert scheduler.counters["stretch"] == 0
    assert run["1"].latency_s == 4


def test_a_stretched_batch_has_the_largest_size_at_most():
    policy = LoadPolicy(mode="literal", comp_wait_s=100)
    run, scheduler = serve(policy, UNIT, arrivals(0, 0.5, 0.5, 0.5), concurrency=1, max_batch_size=3)
    assert scheduler.counters["stretch"] == 1
    assert max(len(each.batch.requests) for each in run.runs) == 3


def test_a_foreseen_split_forbids_stretching():
    model = parse_stages("1000+0,0+250,0+250,0+250")
    trace = arrivals(0, 0, 0, 0, 0.5)
    _, scheduler = serve(LoadOperatorPolicy(mode="literal", comp_wait_s=100), model, trace)
    assert scheduler.counters["stretch"] == 0
    assert scheduler.counters["split"] >= 1


def test_a_client_that_waits_for_its_answers_gets_one_task_each():
    """Its rate looks like full load, but nobody would join: after some requests no task is spent on asking."""
    scheduler = DvaScheduler(LoadOperatorPolicy(), parse_stages("4+4,4+4"))
    tasks, now = [], 0.0
    for number in range(100):
        scheduler.add(ServeRequest(str(number), None), now)
        tasks.append(0)
        for stage in (WorkerId(0), WorkerId(1)):
            task = scheduler.next_batch(stage, now)
            if task is not None:
                now += 0.008 * (task.last_stage - task.stage + 1)
                tasks[-1] += 1
                scheduler.complete(task, simulated_output(task), now)
    assert tasks[10] == 2
    assert tasks[50:] == [1] * 50
    assert not scheduler.num_unfinished


@pytest.mark.parametrize("policy", [LoadPolicy(mode="literal", comp_wait_s=100), InputPolicy(), OperatorPolicy()])
def test_one_poisoned_request_fails_alone(policy: Policy):
    def output(task: StageTask) -> StageOutput:
        if task.stage == 1 and any(request.request_id == "3" for request in task.requests):
            raise ValueError("poison")
        return simulated_output(task)

    run, scheduler = serve(policy, UNIT, arrivals(*[0] * 7), output=output)
    reasons = {served.request_id: served.finished.reason for served in run.requests}
    assert reasons.pop("3") is FinishReason.FAILED
    assert set(reasons.values()) == {FinishReason.DONE}
    assert str(run["3"].finished.error) == "poison"
    assert scheduler.counters["retried parts"] >= 1


def test_a_cancelled_request_leaves_its_batch_between_stages():
    run, _ = serve(Policy(), UNIT, arrivals(0, 0), cancellations=[(1.5, "1")])
    assert run["1"].finished.reason is FinishReason.CANCELLED
    assert run["1"].finished_s == 2.0  # with its stage
    assert [task.batch.num for task in run.runs] == [2, 2, 1, 1]


def test_deadlines_end_requests_wherever_they_are():
    trace = [(0.0, ServeRequest("a", None, deadline_s=1.5)), (0.0, ServeRequest("b", None, deadline_s=9.0))]
    run, scheduler = serve(Policy(), UNIT, trace)
    assert run["a"].finished.reason is FinishReason.EXPIRED
    assert run["a"].finished_s == 2.0
    assert run["b"].finished.reason is FinishReason.DONE
    assert scheduler.num_unfinished == 0


def test_early_exits_and_skipped_stages():
    ran: list[tuple[int, frozenset[int]]] = []

    def output(task: StageTask) -> StageOutput:
        ran.append((task.stage, task.skips))
        exits = {p: "early" for p, request in enumerate(task.requests) if request.request_id == "2" and task.stage == 1}
        skip_to = {p: 3 for p, request in enumerate(task.requests) if request.request_id == "1" and task.stage == 0}
        results = [None] * task.num if task.is_last else ()
        return StageOutput(results=results, exits=exits, skip_to=skip_to)

    run, scheduler = serve(EarlyExitPolicy(mode="literal"), UNIT, arrivals(0, 0, 0), output=output)
    assert run["2"].finished.result == "early"
    assert run["2"].latency_s == 2.0
    assert scheduler.counters["early exits"] == 1
    assert ran == [(0, frozenset()), (1, {0}), (2, {0}), (3, frozenset())]


def test_cells_of_a_recurrent_network():
    """BatchMaker's batching with these operations (section 2): a stage is a cell; join at each, exit early."""

    def output(task: StageTask) -> StageOutput:
        exits = {p: None for p, request in enumerate(task.requests) if request.length == task.stage + 1}
        return StageOutput(results=[None] * task.num if task.is_last else (), exits=exits)

    trace = arrivals(0, 0, 0.5, lengths=[2, 4, 4])
    run, scheduler = serve(LoadPolicy(mode="literal", comp_wait_s=100), UNIT, trace, output=output, concurrency=1)
    assert scheduler.counters["stretch"] == 1
    assert run["1"].latency_s <= 3.0  # leaves after its second cell, whoever goes on
    assert {served.finished.reason for served in run.requests} == {FinishReason.DONE}


POLICIES = [
    lambda: OperatorPolicy(mode="literal"),
    lambda: OperatorPolicy(),
    lambda: LoadPolicy(mode="literal", comp_wait_s=1.0),
    lambda: LoadPolicy(),
    lambda: LoadOperatorPolicy(mode="literal", comp_wait_s=1.0),
    lambda: LoadOperatorPolicy(),
    lambda: InputPolicy(mode="literal"),
    lambda: InputPolicy(),
]


@given(st.data())
def test_nothing_is_lost_doubled_or_cross_wired(data: st.DataObject):
    """Every request leaves once, and passes every stage once, from the row that holds its activations."""
    policy = data.draw(st.sampled_from(POLICIES))()
    stages = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)).filter(any), min_size=1, max_size=4))
    model = StagedModel(tuple(LinearStage(*map(float, times)) for times in stages))
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=14))
    trace, now = [], 0.0
    for number, gap in enumerate(gaps):
        now += gap / 2
        deadline_s = now + data.draw(st.integers(1, 40)) if data.draw(st.integers(0, 4)) == 0 else None
        length = data.draw(st.integers(1, 20))
        trace.append((now, ServeRequest(str(number), None, length=length, deadline_s=deadline_s)))
    cancelled = data.draw(st.lists(st.sampled_from(range(len(gaps))), max_size=3, unique=True))
    cancellations = sorted((trace[n][0] + data.draw(st.integers(0, 9)) / 2, str(n)) for n in cancelled)
    poison = str(data.draw(st.integers(0, len(gaps) * 2)))
    left: dict[int, tuple[str, ...]] = {}

    def output(task: StageTask) -> StageOutput:
        names = tuple(request.request_id for request in task.requests)
        if task.stage:
            found = [left[source.task][row] for source in task.sources for row in source.rows]
            assert found == list(names), "a request met the activations of another"
        if poison in names:
            raise ValueError("poison")
        left[task.number] = names
        for number in task.drops:
            del left[number]
        return StageOutput(results=list(names) if task.is_last else ())

    run, scheduler = serve(
        policy,
        model,
        trace,
        output=output,
        cancellations=cancellations,
        max_batch_size=data.draw(st.integers(1, 6)),
        num_pairs=data.draw(st.integers(1, 3)),
        concurrency=data.draw(st.integers(1, 3)),
    )
    assert sorted(served.request_id for served in run.requests) == sorted(str(n) for n in range(len(gaps)))
    for served in run.requests:
        if served.finished.reason is FinishReason.DONE:
            assert served.finished.result == served.request_id
        elif served.finished.reason is FinishReason.FAILED:
            assert served.request_id == poison
    assert scheduler.num_unfinished == 0
    assert not scheduler.pipeline.table.rows
    assert not scheduler._held.rows_of_task


def test_policy_i_begins_with_who_is_quick_but_not_for_ever():
    """A long request among many short ones waits for them, until it has waited for ``patience_s``."""
    costs = ByTokens()
    trace = arrivals(*(0.0, 0.0, *(0.5 * n for n in range(1, 40))), lengths=[1, 10, *[1] * 39])
    for patience_s, earliest, latest in ((100.0, 30.0, 60.0), (5.0, 15.0, 20.0)):
        run, _ = serve(InputPolicy(patience_s=patience_s), costs, trace, concurrency=1)
        assert earliest <= run["2"].latency_s <= latest
    urgent = [(0.0, ServeRequest(str(n), None, length=n, priority=-n)) for n in (1, 2, 3)]
    run, _ = serve(InputPolicy(), costs, urgent, concurrency=1)
    assert run["3"].latency_s < run["2"].latency_s < run["1"].latency_s


class ByTokens:
    """A batch takes as long as its padded units."""

    num_stages = 1

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return float(num * length)


def test_packed_batches_hold_what_their_tokens_allow():
    trace = [(0.0, ServeRequest(str(n), None, length=30)) for n in range(10)]
    flat = parse_stages("1000+0")  # the more in a batch the better
    run, _ = serve(PackedPolicy(max_tokens=100), flat, trace, concurrency=1)
    assert [batch.batch.num for batch in run.runs] == [3, 3, 3, 1]
