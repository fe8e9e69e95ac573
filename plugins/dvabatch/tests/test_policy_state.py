"""The state that policies look at (load, room, costs), and the plain policy's use of it."""

from __future__ import annotations

import pytest
from mlsys_core.loop import ServeRequest
from mlsys_core.loop.queue import RequestQueue
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import TableCosts, catch_up_s, least_request_s, remaining_s, unit_name
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.base import New, Policy, State
from mlsys_dvabatch.scheduling.policies.planner import planner_for
from mlsys_dvabatch.scheduling.policies.registry import comp_wait_s
from mlsys_dvabatch.stages.simulated import parse_stages

MODEL = parse_stages("4+1,1+2,0+3")


class ByLength:
    """Stage ``s`` takes a start and (s + 1) for each padded unit."""

    num_stages = 3

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return 10.0 + (stage + 1) * num * length


def state_of(num_waiting: int = 0, *, concurrency: int = 1, most: int = 8, num_pairs: int = 2, costs=MODEL) -> State:
    queue: RequestQueue[None] = RequestQueue()
    for number in range(num_waiting):
        queue.push(ServeRequest(str(number), None), now=float(number))
    pipeline = Pipeline(costs.num_stages, num_pairs)
    return State(pipeline, queue, costs, max_batch_size=most, concurrency=concurrency)


def test_times_of_the_rest_and_of_what_came_before():
    costs = ByLength()
    assert [remaining_s(costs, stage, 2, 5) for stage in range(4)] == [30 + 60, 20 + 50, 10 + 30, 0]
    assert [catch_up_s(costs, stages, 2, 5) for stages in range(4)] == [0, 20, 50, 90]
    assert remaining_s(costs, 1, 2) == 20 + 10
    assert catch_up_s(costs, 2, 2) == 20 + 6
    assert comp_wait_s(costs, 200.0, 2, 5) == 200.0 - 2 * 90
    assert comp_wait_s(costs, 180.0, 2, 5) == comp_wait_s(costs, 100.0, 2, 5) == 0.0


def test_the_least_work_of_a_request_is_at_the_best_size():
    assert least_request_s(parse_stages("8+1"), 6) == pytest.approx((0.008 + 6 * 0.001) / 6)
    assert least_request_s(parse_stages("8+1"), 1) == pytest.approx(0.009)
    assert least_request_s(ByLength(), 4, 3) == pytest.approx((30 + 6 * 4 * 3) / 4)
    times = (1.0, 1.1, 9.0, 20.0)  # two at once cost hardly more than one; more are dear
    table = ProfileTable((UnitProfile(unit_name(0, 1), (1, 2, 4, 8), times),))
    assert least_request_s(TableCosts(table, 1), 8) == pytest.approx(0.55)


def test_lengths_between_measured_ones():
    units = [
        UnitProfile(unit_name(stage, length), (1, 2), (10.0 * length * (stage + 1), 20.0 * length * (stage + 1)))
        for stage in range(2)
        for length in (2, 4, 8)
    ]
    costs = TableCosts(ProfileTable(tuple(units)), 2, (2, 4, 8))
    assert [costs.stage_s(0, 1, length) for length in (1, 2, 3, 4, 5, 6, 8, 12)] == [20, 20, 30, 40, 50, 60, 80, 120]
    assert costs.stage_s(1, 2, 5) == 200.0
    assert costs.stage_s(0, 4, 2) == 80.0, "beyond the largest size as between the last two"
    assert costs.stage_s(0, 1) == 20.0
    assert unit_name(1, 8) == "stage 1 at 8"


def test_the_load_is_not_known_before_eight_have_come():
    state = state_of()
    for number in range(8):
        assert state.utilisation() == 0.3
        state.note_arrival(number * 0.1)
    assert state.utilisation() != 0.3
    at_once = state_of()
    for _ in range(20):
        at_once.note_arrival(5.0)
    assert at_once.utilisation() == at_once._busy_share, "no time has passed: all work for as long as any is here"
    at_once.note_arrival(6.0)
    assert at_once.utilisation() == pytest.approx(20 * least_request_s(MODEL, 8))
    crowd = state_of(num_waiting=20)
    for _ in range(100):
        crowd.note_arrival(5.0)
    assert crowd.utilisation() > 0.99
    assert at_once.is_draining is False


def test_the_load_is_the_rate_by_the_work_of_a_request():
    for concurrency in (1, 2):
        state = state_of(num_waiting=2, concurrency=concurrency)
        for number in range(11):
            state.note_arrival(1.0 + number * 0.1)
        assert state.utilisation() == pytest.approx(10 * least_request_s(MODEL, 8) / concurrency)
    long = state_of(num_waiting=2, costs=ByLength())
    for number in range(11):
        long.note_arrival(number * 1000.0)
    assert long.utilisation(5) == pytest.approx(least_request_s(ByLength(), 8, 5) / 1000)
    for number in range(600):
        long.note_arrival(10_000.0 + number)
    assert long.utilisation() == pytest.approx(1.0), "the last 512 count, and it is never above who finds others"


def test_the_last_512_arrivals_count():
    state = state_of(num_waiting=2)
    state.note_arrival(0.0)
    for number in range(511):
        state.note_arrival(1e6 + number)
    assert state.utilisation() == pytest.approx(511 / (1e6 + 510) * least_request_s(MODEL, 8))
    state.note_arrival(1e6 + 511)
    assert state.utilisation() == pytest.approx(least_request_s(MODEL, 8))


def test_an_arrival_at_an_empty_server_lowers_the_load():
    """A client that asks when it has its answer looks like full load by its rate alone."""
    state = state_of(num_waiting=1)  # the one that has just come
    for number in range(16):
        state.note_arrival(number * 1e-6)
    assert state.utilisation() == pytest.approx((15 / 16) ** 16)
    state.pipeline.new(["active"], 0.0)
    state.note_arrival(16e-6)
    lone = (15 / 16) ** 16
    assert state.utilisation() == pytest.approx(lone + (1 - lone) / 16)
    company = state_of(num_waiting=2)
    for number in range(16):
        company.note_arrival(number * 1e-6)
    assert company.utilisation() == 1.0


@pytest.mark.parametrize(
    ("load", "nearest"), [(0.04, 0.01), (0.05, 0.1), (0.14, 0.1), (0.16, 0.2), (0.94, 0.9), (5.0, 0.9)]
)
def test_planners_are_made_for_tenths_of_the_load(load: float, nearest: float):
    state = state_of(num_waiting=2)
    every_s = least_request_s(MODEL, 8) / load
    for number in range(11):
        state.note_arrival(number * every_s)
    assert state.planner() is planner_for(MODEL, 8, nearest, 1)


def test_the_load_is_that_of_the_length():
    state = state_of(num_waiting=2, costs=ByLength())
    for number in range(11):
        state.note_arrival(number * 100.0)
    assert [round(state.utilisation(length), 2) for length in (1, 4)] == [0.1, 0.28]
    assert state.planner(3) is planner_for(state.costs, 8, 0.3, 4)
    assert state.planner(1) is planner_for(state.costs, 8, 0.1, 1)


def test_planners_are_made_for_powers_of_two():
    state = state_of(costs=ByLength())
    for length, covering in ((0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (65, 128)):
        assert state.planner(length) is planner_for(state.costs, 8, 0.3, covering)
    assert state.planner() is state.planner(1)


def test_a_batch_can_begin_where_executor_pair_and_device_have_room():
    state = state_of()
    assert state.can_begin()
    state.pipeline.new(["a"], 0.0)
    assert not state.can_begin(), "one waits for the first executor already"
    state.pipeline.start(0)
    assert not state.can_begin(), "the first executor works"
    state.pipeline.finish(0)
    assert not state.can_begin(), "on one device the later stage goes first"
    assert not state_with_batch_after_first(concurrency=1).can_begin()
    assert state_with_batch_after_first(concurrency=2).can_begin()
    working = state_with_batch_after_first(concurrency=2)
    working.pipeline.start(1)
    assert working.can_begin()
    two = state_of(concurrency=3)
    two.pipeline.new(["a"], 0.0)
    two.pipeline.start(0)
    assert not two.can_begin(), "the first executor works, whatever the device could"
    assert not state_with_batch_after_first(concurrency=2, num_pairs=1).can_begin(), "no pair is free"


def state_with_batch_after_first(*, concurrency: int, num_pairs: int = 2) -> State:
    state = state_of(concurrency=concurrency, num_pairs=num_pairs)
    state.pipeline.new(["a"], 0.0)
    state.pipeline.start(0)
    state.pipeline.finish(0)
    return state


def test_requests_are_taken_by_priority_and_arrival():
    state = state_of(3)
    state.waiting.push(ServeRequest("urgent", None, priority=-1), now=9.0)
    assert (state.num_waiting, state.num_active, state.oldest_s) == (4, 0, 0.0)
    assert [request.request_id for request in state.take(2, 9.0)] == ["urgent", "0"]
    assert [request.request_id for request in state.take(9, 9.0)] == ["1", "2"]
    assert (state.take(1, 9.0), state.take(0, 9.0), state.num_waiting, state.oldest_s) == ([], [], 0, None)


def test_the_plain_policy_begins_with_all_that_may_be_in_a_batch():
    policy = Policy()
    state = state_of(10)
    (new,) = policy.admit(state, 0.0)
    assert isinstance(new, New)
    assert [request.request_id for request in new.requests] == [str(number) for number in range(8)]
    assert new.can_stretch
    assert state.num_waiting == 2
    row = state.pipeline.new(["a"], 0.0)
    assert policy.admit(state, 0.0) == ()
    assert (list(policy.split(row, 0, state, 0.0)), policy.splits_serially) == ([], True)
    assert (policy.run_to(row, 1, state), policy.wake_at(state, 0.0), policy.mode) == (1, None, "cost-aware")
