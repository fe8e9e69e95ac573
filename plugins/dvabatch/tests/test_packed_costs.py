"""What a packed batch costs: its units together, and attention by how many requests share them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.loop import ServeRequest
from mlsys_core.loop.queue import RequestQueue
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import PackedCosts, StageCosts, unit_name
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.base import State
from mlsys_dvabatch.scheduling.policies.input import PackedPolicy
from mlsys_dvabatch.stages.profile import SHARERS, packed_units, profile_stages

UNITS = (8, 16, 32, 64, 128, 256)


def true_s(units: float, num: float) -> float:
    """A start, a time for each unit, and attention: the square of each request's units."""
    return 1.0 + 0.1 * units + 0.005 * units**2 / num


def measured(units: Sequence[int] = UNITS) -> PackedCosts:
    rows = [UnitProfile(unit_name(0, each), SHARERS, tuple(true_s(each, num) for num in SHARERS)) for each in units]
    return PackedCosts(ProfileTable(tuple(rows)), 1, tuple(units))


class OneRequestCosts:
    """What was assumed before: a batch costs what one request of all its units costs."""

    num_stages = 1

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return measured().stage_s(stage, 1, num * length)


@given(num=st.sampled_from(SHARERS), length=st.sampled_from((1, 2, 4, 8, 16)))
def test_what_was_measured_is_told(num: int, length: int):
    if num * length in UNITS:
        assert measured().stage_s(0, num, length) == true_s(num * length, num)


@given(num=st.integers(1, 64), length=st.integers(1, 40))
def test_between_and_beyond_the_measured_it_lies_between_the_neighbours(num: int, length: int):
    units = min(max(num * length, UNITS[0]), UNITS[-1])
    share = max(1.0, num * length / UNITS[-1])  # beyond the largest, proportional
    told = measured().stage_s(0, num, length) / share
    few = max(size for size in SHARERS if size <= num)
    many = min((size for size in SHARERS if size >= num), default=SHARERS[-1])
    low = max(each for each in UNITS if each <= units)
    high = min(each for each in UNITS if each >= units)
    assert true_s(low, many) - 1e-9 <= told <= true_s(high, few) + 1e-9


def first_batch(costs: StageCosts, lengths: Sequence[int]) -> int:
    queue: RequestQueue[None] = RequestQueue()
    state = State(Pipeline(1), queue, costs, max_batch_size=64, concurrency=1)
    for number, length in enumerate(lengths):
        queue.push(ServeRequest(str(number), None, length=length), now=0.0)
    (batch,) = PackedPolicy().admit(state, 0.0)
    return len(batch.requests)


@pytest.mark.parametrize("num", [8, 16, 32])
def test_more_short_requests_share_a_batch_than_if_each_attended_to_all_units(num: int):
    assert first_batch(measured(), [8] * num) > first_batch(OneRequestCosts(), [8] * num)


class Recording:
    """A model of one stage that keeps the lengths of each batch it is given."""

    num_stages = 1

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def collate(self, requests: Sequence[ServeRequest[Any]], length: int) -> Any:
        self.seen.append([request.length for request in requests])
        assert [request.payload for request in requests] == self.seen[-1]
        return SimpleNamespace(nbytes=0)

    def run(self, stage: int, values: Any) -> Any:
        return values


@pytest.mark.parametrize(
    ("units", "batches"),
    [
        (10, [[10], [5, 5], [3, 3, 2, 2], [2] * 5]),
        (1, [[1], [1], [1], [1]]),
        (33, [[33], [17, 16], [9, 8, 8, 8], [3] + [2] * 15]),
    ],
)
def test_requests_share_the_units_when_a_packed_model_is_measured(units: int, batches: list[list[int]]):
    model: Any = Recording()
    costs = profile_stages(model, lambda length: length, batch_sizes=SHARERS, lengths=(units,), is_packed=True)
    assert model.seen == batches
    assert isinstance(costs, PackedCosts)


def test_a_full_batch_is_measured_with_no_request_longer_than_there_are():
    model: Any = Recording()
    units = packed_units((8, 200))
    assert units == (8, 200, 512) == packed_units((8, 200, 512))
    profile_stages(model, lambda length: length, batch_sizes=(1, 4), lengths=units, is_packed=True, longest=200)
    assert model.seen[-2:] == [[171, 171, 170], [128] * 4]


def test_a_batch_is_not_divided_where_its_parts_cost_as_much():
    """Each batch costs a task besides, so that many who wait are served in few batches."""
    flat = PackedCosts(
        ProfileTable(tuple(UnitProfile(unit_name(0, n), (1,), (1e-6 * n,)) for n in (8, 512))), 1, (8, 512)
    )
    assert first_batch(flat, [8] * 20) == 20
