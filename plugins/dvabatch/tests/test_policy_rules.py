"""Each rule of the input and operator policies by itself, on states made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.loop import ServeRequest
from mlsys_core.loop.queue import RequestQueue
from mlsys_core.plugins import Registry
from mlsys_core.plugins.specs import PolicySpec
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import StageCosts, TableCosts, unit_name
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.base import Mode, New, Policy, State
from mlsys_dvabatch.scheduling.policies.decisions import halves_literally, planned_split, sizes_by_cost
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.scheduling.policies.planner import LONGEST_RUN_S
from mlsys_dvabatch.scheduling.policies.registry import make_policy
from mlsys_dvabatch.stages.simulated import parse_stages

START_S = 3.0


class ByUnits:
    """A batch takes a start and its padded units, in each of two stages."""

    num_stages = 2

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.start_s = START_S

    @classmethod
    def without_start(cls) -> ByUnits:
        costs = cls()
        costs.start_s = 0.0
        return costs

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return self.scale * (self.start_s + num * length)


def waiting(
    lengths: Sequence[int], *, costs: StageCosts | None = None, at: Sequence[float] = (), most: int = 8, active: int = 0
) -> State:
    """Return a state in which requests "0", "1", ... of these lengths wait, ``active`` others being in a batch."""
    queue: RequestQueue[None] = RequestQueue()
    costs = costs or ByUnits()
    state = State(Pipeline(costs.num_stages), queue, costs, max_batch_size=most, concurrency=1)
    for number, length in enumerate(lengths):
        queue.push(ServeRequest(str(number), None, length=length), now=at[number] if at else 0.0)
    if active:
        state.pipeline.new([f"active {n}" for n in range(active)], 0.0)
    return state


def begun(policy: Policy, state: State, now: float = 0.0) -> list[list[str]]:
    batches = policy.admit(state, now)
    assert all(isinstance(batch, New) and batch.can_stretch is False for batch in batches)
    return [[request.request_id for request in batch.requests] for batch in batches]


def test_literal_input_waits_for_the_window_while_others_run():
    policy = InputPolicy(mode="literal", bounds=(4, 16), window_s=2.0)
    state = waiting([3, 9, 4, 30], at=[1.0, 1.5, 1.6, 1.7], active=2)
    assert policy.wake_at(state, 1.8) == 3.0
    assert begun(policy, state, 2.99) == []
    assert begun(policy, state, 3.0) == [["0", "2"], ["1"], ["3"]]
    assert state.num_waiting == 0
    assert policy.wake_at(state, 3.0) is None


def test_literal_input_waits_for_nobody_without_reason():
    policy = InputPolicy(mode="literal", bounds=(4,), window_s=2.0)
    assert begun(policy, waiting([1])) == [["0"]]  # nothing runs
    draining = waiting([1], active=1)
    draining.is_draining = True
    assert begun(policy, draining) == [["0"]]
    assert begun(policy, waiting([1] * 5, most=8, active=3)) == [["0", "1", "2", "3", "4"]]  # as many as there is room
    assert begun(policy, waiting([1] * 4, most=8, active=3)) == []
    assert begun(policy, waiting([1] * 9, most=8, active=7)) == [["0"]]
    full = waiting([1], most=8, active=8)
    assert begun(policy, full, 99.0) == []
    assert policy.wake_at(full, 0.0) is None


def test_the_window_is_the_first_stage_at_the_largest_batch():
    policy = InputPolicy(mode="literal")
    state = waiting([1], at=[5.0], active=1)
    state.mean_length = 2.4
    assert policy.wake_at(state, 5.0) == 5.0 + START_S + 8 * 2
    state.mean_length = 0.2
    assert policy.wake_at(state, 5.0) == 5.0 + START_S + 8 * 1
    assert InputPolicy(mode="cost-aware").wake_at(state, 5.0) is None


def test_cost_aware_input_begins_the_cluster_that_serves_most_a_second():
    policy = InputPolicy(patience_s=10.0)
    state = waiting([50, 2, 60, 2, 2])
    assert begun(policy, state) == [["1", "3", "4"]]
    assert [request.request_id for request, _ in state.waiting.waiting()] == ["0", "2"]
    assert begun(policy, waiting([50, 2, 60, 2, 3], active=1)) == []  # the first executor is taken


def test_a_request_past_its_patience_goes_first():
    lengths, at = [50, 2, 2, 2], [0.0, 9.0, 9.0, 9.0]
    assert begun(InputPolicy(patience_s=10.0), waiting(lengths, at=at), 10.0) == [["1", "2", "3"]]
    assert begun(InputPolicy(patience_s=10.0), waiting(lengths, at=at), 10.1) == [["0"]]


def test_the_most_urgent_priority_is_served_alone():
    state = waiting([2, 2])
    state.waiting.push(ServeRequest("urgent", None, length=40, priority=-1), now=0.0)
    assert begun(InputPolicy(), state) == [["urgent"]]
    assert begun(InputPolicy(), waiting([2] * 12, costs=parse_stages("1+0"), most=8)) == [[str(n) for n in range(8)]]


def test_lengths_taken_move_the_mean():
    state = waiting([21, 21])
    state.take(1, 0.0)
    assert state.mean_length == pytest.approx(2.0)
    state.take_these([request for request, _ in state.waiting.waiting()])
    assert state.mean_length == pytest.approx(2.0 + 19 * 0.05)


@pytest.mark.parametrize(
    ("mode", "scale", "to"), [("literal", 1e-9, 0), ("cost-aware", 1e-9, 1), ("cost-aware", 1.0, 0)]
)
def test_input_runs_on_where_that_is_short(mode: Mode, scale: float, to: int):
    state = waiting([], costs=ByUnits(scale))
    row = state.pipeline.new(["a", "b"], 0.0, padded_length=5)
    assert InputPolicy(mode=mode).run_to(row, 0, state) == to


def test_input_runs_on_as_long_as_the_longest_run_and_no_longer():
    exact = LONGEST_RUN_S / (2 * (START_S + 10))  # two stages of two requests padded to five
    for scale, to in ((exact * 0.999, 1), (exact * 1.001, 0)):
        state = waiting([], costs=ByUnits(scale))
        row = state.pipeline.new(["a", "b"], 0.0, padded_length=5)
        assert InputPolicy().run_to(row, 0, state) == to
        packed = waiting([], costs=ByUnits(scale))
        packed.mean_length = 5.3
        assert PackedPolicy().run_to(packed.pipeline.new(["a", "b"], 0.0), 0, packed) == to
    for scale, to in ((0.999, 1), (1.001, 0)):
        short = waiting([], costs=ByUnits(scale * LONGEST_RUN_S / (2 * (START_S + 2))))
        short.mean_length = 0.2  # counts as one unit
        assert PackedPolicy().run_to(short.pipeline.new(["a", "b"], 0.0), 0, short) == to


def test_literal_packing_takes_whoever_comes_until_the_tokens_are_full():
    policy = PackedPolicy(mode="literal", max_tokens=10)
    assert begun(policy, waiting([4, 4, 4, 4])) == [["0", "1", "2"]]  # the third fills them
    assert begun(policy, waiting([5, 5, 1])) == [["0", "1"]]
    assert begun(policy, waiting([99, 1])) == [["0"]]
    assert begun(policy, waiting([1] * 9, most=4)) == [["0", "1", "2", "3"]]
    assert begun(policy, waiting([1], active=1)) == []
    assert begun(PackedPolicy(mode="literal"), waiting([512, 1])) == [["0"]]


def test_cost_aware_packing_keeps_to_the_tokens_in_order_of_arrival():
    policy = PackedPolicy(max_tokens=10)
    assert begun(policy, waiting([4, 4, 4])) == [["0", "1"]]
    assert begun(policy, waiting([6, 4, 4])) == [["1", "2"]]  # two short ones serve more a second
    assert begun(policy, waiting([40])) == [["0"]]  # alone it may be longer
    assert begun(policy, waiting([4], active=1)) == []


def test_halves_pay_where_the_rest_takes_twice_as_long():
    assert halves_literally(parse_stages("0+1"), 0, 2)
    assert not halves_literally(parse_stages("0.01+1"), 0, 2)
    assert not halves_literally(parse_stages("0+1"), 0, 1)
    assert halves_literally(parse_stages("0+1"), 0, 5)  # 5 against twice 2
    assert halves_literally(parse_stages("9+0,0+1"), 1, 4)
    assert not halves_literally(parse_stages("9+0,0+1"), 0, 4)


def test_lengths_count_where_costs_know_them():
    """For long requests a batch saves nothing but its start; for short ones that is most of it."""
    costs = ByUnits()
    assert [halves_literally(costs, 0, 2, length) for length in (1, 100)] == [False, False]
    assert halves_literally(ByUnits.without_start(), 0, 2, 100)
    assert [len(sizes_by_cost(costs, 0, 4, num_behind=0, length=length)) for length in (1, 100)] == [1, 4]


@pytest.mark.parametrize("others", [0, 7])
def test_a_waiting_request_pays_for_each_batch_before_it(others: int):
    """At a high load many will wait behind these two, so it counts that one batch has one start."""
    for load, together in ((0.0, False), (0.95, True)):
        state = waiting([5, 4] + [4] * others, most=2)
        state._busy_share = load
        for number in range(8):
            state._arrivals_s.append(number * 1e-9)
        assert begun(InputPolicy(), state) == ([["0", "1"]] if together else [["1"]])


def test_a_split_is_paid_for_by_those_behind():
    linear = parse_stages("0+1000")  # a second a request
    waiting_s, work_s = planned_split(linear, 0, 4, 0)
    assert (waiting_s, work_s) == (1 + 2 + 3 + 4, 4)
    started = parse_stages("1000+0")
    assert planned_split(started, 0, 4, 0) == (4, 1)
    assert planned_split(started, 1, 4, 0) == (0, 0)


def test_tables_are_checked():
    table = ProfileTable(tuple(UnitProfile(unit_name(0, length), (1, 2), (1.0, 3.0)) for length in (10, 20, 40)))
    costs = TableCosts(table, 1, (10, 20, 40))
    assert [costs.stage_s(0, 2, length) for length in (1, 10, 15, 20, 40, 80)] == [3.0, 3.0, 3.0, 3.0, 3.0, 6.0]
    for num_stages, lengths in ((0, (10,)), (1, ()), (1, (20, 10)), (1, (10, 10))):
        with pytest.raises(InvalidInputError, match="at least one of each, lengths rising"):
            TableCosts(table, num_stages, lengths)
    with pytest.raises(InvalidInputError, match="stage 1 at 10"):
        TableCosts(table, 2, (10,))
    one = TableCosts(table, 1, (10,))
    assert one.stage_s(0, 2, 500) == 3.0  # one length: inputs have one shape


def test_an_unknown_policy_is_named():
    registry = Registry()
    registry.add(PolicySpec(name="dvabatch-text", kind="batching", help="x", factory="builtins:str"), "them")
    with pytest.raises(PluginError, match="policy 'text': its factory gave a str, not a Policy"):
        make_policy("text", registry)
    registry.add(
        PolicySpec(
            name="dvabatch-own", kind="batching", help="x", factory="mlsys_dvabatch.scheduling.policies.base:Policy"
        ),
        "them",
    )
    with pytest.raises(InvalidInputError, match=r"policy 'own' does not take \['colour'\]"):
        make_policy("own", registry, colour="red")
    assert make_policy("own", registry, mode="literal").mode == "literal"
