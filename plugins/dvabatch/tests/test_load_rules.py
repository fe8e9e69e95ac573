"""Policies II and III rule by rule, on states made by hand: who joins, who does not, where a batch is split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mlsys_core.loop import ServeRequest
from mlsys_core.loop.queue import RequestQueue
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.base import New, Policy, State
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy, LazyPolicy, LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.table import Row
from mlsys_dvabatch.stages.simulated import parse_stages

FLAT = parse_stages("10+0,10+0,10+0,10+0")  # weights are all that costs: joining pays
LINEAR = parse_stages("0+10,0+10,0+10,0+10")  # it never does
PARTS = parse_stages("40+0,0+10")  # the second stage wants single requests


class ByPowers:
    """Stages of eight seconds and a sixteenth for each padded unit: sums are exact."""

    num_stages = 4

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return 8.0 + num * length / 16


def state_of(
    costs: StageCosts = FLAT, *, lengths: Sequence[int] = (1,), num_pairs: int = 2, most: int = 8, concurrency: int = 1
) -> State:
    queue: RequestQueue[None] = RequestQueue()
    for number, length in enumerate(lengths):
        queue.push(ServeRequest(str(number), None, length=length), now=0.0)
    return State(Pipeline(costs.num_stages, num_pairs), queue, costs, max_batch_size=most, concurrency=concurrency)


def under_way(state: State, num: int = 1, *, after: int | None = 0, now: float = 0.0, length: int = 1) -> Row:
    """A batch of ``num`` that has completed the stages up to ``after`` and waits for the next; None: for the first."""
    row = state.pipeline.new([f"early {n}" for n in range(num)], now, padded_length=length)
    for stage in range(-1 if after is None else after + 1):
        state.pipeline.start(stage)
        state.pipeline.finish(stage)
    return row


def said(policy: Policy, state: State, now: float = 0.0) -> list[tuple[str, list[str]]]:
    return [
        (type(each).__name__.lower(), [request.request_id for request in each.requests])
        for each in policy.admit(state, now)
    ]


@pytest.mark.parametrize(("now", "expected"), [(0.0, ["stretch"]), (0.499, ["stretch"]), (0.5, []), (0.9, [])])
def test_literal_all_join_while_the_batch_is_young(now: float, expected: list[str]):
    policy = LoadPolicy(mode="literal", comp_wait_s=0.5)
    state = state_of(lengths=[1, 1, 1])
    under_way(state, 2)
    assert said(policy, state, now) == [(each, ["0", "1", "2"]) for each in expected]
    assert state.num_waiting == (0 if expected else 3)


@pytest.mark.parametrize(("size", "joined"), [(2, 5), (4, 4), (7, 1), (8, 0)])
def test_literal_a_stretched_batch_keeps_to_the_largest_size(size: int, joined: int):
    policy = LoadPolicy(mode="literal")
    state = state_of(lengths=[1] * 5)
    under_way(state, size)
    assert said(policy, state) == ([("stretch", [str(n) for n in range(joined)])] if joined else [])


def test_whoever_is_longer_than_the_batch_begins_one_of_its_own():
    policy = LoadPolicy(mode="literal")
    state = state_of(lengths=[3, 9, 5, 6])
    under_way(state, length=5)
    assert said(policy, state) == [("stretch", ["0", "2"]), ("new", ["1", "3"])]
    longer = state_of(lengths=[9])
    under_way(longer, length=5)
    assert said(policy, longer) == [("new", ["0"])]


def test_the_catch_up_must_be_able_to_start_now():
    policy = LoadPolicy(mode="literal")
    busy = state_of()
    under_way(busy, after=None)
    busy.pipeline.start(0)
    assert said(policy, busy) == [], "the first executor is at work"
    other = state_of(num_pairs=3)
    other.pipeline.new(["other"], 0.0)
    row = under_way(other, after=None)
    assert said(policy, other) == [], "another batch waits for it"
    assert not policy._may_stretch(row, other)
    own = state_of()
    under_way(own, after=None)
    assert said(policy, own) == [("stretch", ["0"])], "what waits there is of the batch itself"


def test_a_last_stage_is_not_waited_for():
    for mode in ("literal", "cost-aware"):
        state = state_of(concurrency=2)
        under_way(state, after=2)
        state.pipeline.start(3)
        assert said(LoadPolicy(mode=mode), state) == [("new", ["0"])]


def test_by_cost_they_join_where_that_saves_work():
    joins = state_of(lengths=[1, 1, 1])
    under_way(joins)
    assert said(LoadPolicy(), joins) == [("stretch", ["0", "1", "2"])]
    for costs in (LINEAR,):
        apart = state_of(costs, lengths=[1, 1, 1])
        under_way(apart)
        assert said(LoadPolicy(), apart) == []


def test_by_cost_a_batch_at_work_or_held_is_left_alone():
    at_work = state_of(lengths=[1, 1])
    under_way(at_work)
    at_work.pipeline.start(1)
    assert said(LoadPolicy(), at_work) == []
    held = state_of(lengths=[1, 1])
    row = under_way(held)
    held.pipeline.stretch(["late"])
    assert row.held_after is not None
    assert LoadPolicy()._best_late(row, held, 0.0) == 0


def test_by_cost_nobody_joins_who_makes_the_batch_miss_its_target():
    """The target is missed by the stretch alone: not where it is met all the same, nor where it is missed anyway."""
    costs, length, age_s, late = ByPowers(), 4, 0.5, 3
    alone_s = age_s + 3 * (8 + 4 / 16)  # three stages of one request of four units
    with_s = age_s + (8 + 12 / 16) + 3 * (8 + 16 / 16)
    for qos_s, joins in ((None, True), (with_s, True), (with_s - 1e-9, False), (alone_s, False), (alone_s - 1, True)):
        state = state_of(costs, lengths=[length] * late)
        under_way(state, now=1.0, length=length)
        expected = [("stretch", ["0", "1", "2"])] if joins else []
        assert said(LoadPolicy(qos_s=qos_s), state, 1.0 + age_s) == expected, qos_s


def test_new_batches_are_of_the_best_size_by_cost_and_as_they_come_to_the_letter():
    assert said(LoadPolicy(), state_of(LINEAR, lengths=[1] * 5)) == [("new", ["0"])]
    assert said(LoadPolicy(), state_of(FLAT, lengths=[1] * 5)) == [("new", ["0", "1", "2", "3", "4"])]
    assert said(LoadPolicy(mode="literal"), state_of(LINEAR, lengths=[1] * 5)) == [("new", ["0", "1", "2", "3", "4"])]
    assert said(OperatorPolicy(), state_of(LINEAR, lengths=[1] * 5)) == [("new", ["0"])]
    assert said(OperatorPolicy(mode="literal"), state_of(LINEAR, lengths=[1] * 9)) == [
        ("new", [str(n) for n in range(8)])
    ]
    for policy in (LoadPolicy(), LoadPolicy(mode="literal"), OperatorPolicy(), OperatorPolicy(mode="literal")):
        busy = state_of(LINEAR, lengths=[1])
        busy.pipeline.new(["other"], 0.0, can_stretch=False)
        assert said(policy, busy) == []


@pytest.mark.parametrize(("costs", "can_stretch"), [(PARTS, False), (FLAT, True), (parse_stages("0+10,10+0"), True)])
def test_literal_a_batch_that_will_be_split_is_not_to_be_stretched(costs: StageCosts, can_stretch: bool):
    """Only what comes after the first stage counts: before it nothing is split to the letter."""
    state = state_of(costs, lengths=[1] * 4, num_pairs=1)
    (new,) = LoadOperatorPolicy(mode="literal").admit(state, 0.0)
    assert isinstance(new, New)
    assert new.can_stretch == can_stretch
    state = state_of(costs, lengths=[1] * 4, num_pairs=1)
    (new,) = LoadOperatorPolicy().admit(state, 0.0)
    assert isinstance(new, New)
    assert new.can_stretch, "by cost it may be, until it is split"


@pytest.mark.parametrize("policy", [OperatorPolicy(mode="literal"), LoadOperatorPolicy(mode="literal")])
def test_literal_halves(policy: Policy):
    """Odd requests go to the first half; a single one is not split, nor what runs best as a whole."""
    state = state_of(PARTS, lengths=[], num_pairs=1)
    row = under_way(state, 5)
    assert policy.split(row, 0, state, 0.0) == [["early 0", "early 1", "early 2"], ["early 3", "early 4"]]
    single = state_of(PARTS, lengths=[], num_pairs=1)
    assert list(policy.split(under_way(single), 0, single, 0.0)) == []
    flat = state_of(FLAT, lengths=[], num_pairs=1)
    assert list(policy.split(under_way(flat, 4), 0, flat, 0.0)) == []


@pytest.mark.parametrize("policy", [OperatorPolicy(), LoadOperatorPolicy()])
def test_by_cost_a_batch_is_split_into_as_many_as_pays(policy: Policy):
    state = state_of(PARTS, lengths=[], num_pairs=1)
    row = under_way(state, 4)
    assert policy.split(row, 0, state, 0.0) == [["early 0"], ["early 1"], ["early 2"], ["early 3"]]
    flat = state_of(FLAT, lengths=[], num_pairs=1)
    assert [len(group) for group in policy.split(under_way(flat, 4), 0, flat, 0.0)] == [4]


class Asked:
    """A planner that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def run_to(self, *question: int) -> int:
        self.asked.append(question)
        return 2

    def begin(self, *question: int) -> int:
        self.asked.append(question)
        return 2

    def split(self, *question: int) -> list[int]:
        self.asked.append(question)
        return [2, 1]


@pytest.mark.parametrize("kind", [LoadPolicy, OperatorPolicy, LoadOperatorPolicy])
def test_by_cost_all_others_here_count_as_behind_the_batch(kind: type[Policy], monkeypatch: pytest.MonkeyPatch):
    state = state_of(lengths=[1] * 4)
    row = under_way(state, 3, length=6)
    state.pipeline.new(["x", "y"], 0.0)
    planner, lengths = Asked(), []
    monkeypatch.setattr(state, "planner", lambda length: lengths.append(length) or planner)
    assert kind().run_to(row, 1, state) == 2
    assert (planner.asked, lengths) == ([(1, 3, 4 + 2)], [6])
    if kind is not LoadPolicy:
        assert kind().split(row, 1, state, 0.0) == [["early 0", "early 1"], ["early 2"]]
        assert (planner.asked[1], lengths) == ((2, 3, 4 + 2), [6, 6])
    assert kind(mode="literal").run_to(row, 1, state) == 1, "to the letter it is asked after every stage"


@pytest.mark.parametrize("kind", [LoadPolicy, OperatorPolicy, LoadOperatorPolicy])
@pytest.mark.parametrize(("mean_length", "length"), [(0.2, 1), (1.4, 1), (2.6, 3)])
def test_by_cost_new_batches_are_of_what_is_best_for_the_mean_length(
    kind: type[Policy], mean_length: float, length: int, monkeypatch: pytest.MonkeyPatch
):
    state = state_of(lengths=[1] * 5)
    state.mean_length = mean_length
    planner, lengths = Asked(), []
    monkeypatch.setattr(state, "planner", lambda length: lengths.append(length) or planner)
    assert said(kind(), state) == [("new", ["0", "1"])]
    assert (planner.asked, lengths) == ([(5,)], [length])


def test_defaults():
    for kind, pairs in ((LoadPolicy, 2), (LoadOperatorPolicy, 1), (EarlyExitPolicy, 2)):
        policy = kind()
        assert (policy.mode, policy.num_pairs, policy.comp_wait_s) == ("cost-aware", pairs, 0.1)
        assert policy.qos_s is None
    given = LoadOperatorPolicy(mode="literal", comp_wait_s=3.0, qos_s=4.0)
    assert (given.mode, given.comp_wait_s, given.qos_s) == ("literal", 3.0, 4.0)
    assert (LazyPolicy().mode, LazyPolicy().comp_wait_s, LazyPolicy(comp_wait_s=2.0).comp_wait_s) == (
        "literal",
        0.1,
        2.0,
    )
    assert LazyPolicy(mode="cost-aware").mode == "cost-aware"
    assert (LoadPolicy.wants_exits, EarlyExitPolicy.wants_exits) == (False, True)
