"""The arithmetic of the policies against brute force, their registration, and the automatic choice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.specs import PolicySpec
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import TableCosts, unit_name
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.decisions import cluster, cluster_by_bounds, sizes_by_cost
from mlsys_dvabatch.scheduling.policies.registry import Diversities, choose, comp_wait_s, make_policy, policy_names
from mlsys_dvabatch.stages.profile import OperatorProfile
from mlsys_dvabatch.stages.simulated import parse_stages


class ByTokens:
    """A batch costs a start and its padded tokens."""

    num_stages = 1

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return self.start_s + num * length


def waiting_s(costs: ByTokens, lengths: list[int], batches: list[list[int]], behind: float) -> float:
    now = total = 0.0
    for batch in batches:
        now += costs.stage_s(0, len(batch), max(lengths[position] for position in batch))
        total += now * len(batch)
    return total + now * behind


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(0, 40),
    st.integers(0, 9),
    st.sampled_from([math.inf, 25, 60]),
)
def test_clusters_are_the_best_intervals(lengths: list[int], start_s: int, behind: int, most: float):
    costs = ByTokens(float(start_s))

    def batch_s(num: int, longest: int, _: int) -> float:
        return costs.stage_s(0, num, longest)

    def fits(batch: list[int]) -> bool:
        return len(batch) == 1 or sum(lengths[position] for position in batch) <= most

    found = cluster(batch_s, lengths, num_behind=behind, max_units=most)
    assert all(map(fits, found))
    assert sorted(position for batch in found for position in batch) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ways = (
        [order[a:b] for a, b in itertools.pairwise((0, *cuts, len(order)))]
        for count in range(len(order))
        for cuts in itertools.combinations(range(1, len(order)), count)
    )
    best = min(waiting_s(costs, lengths, way, behind) for way in ways if all(map(fits, way)))
    assert waiting_s(costs, lengths, found, behind) == pytest.approx(best)


def test_clusters_by_bounds():
    assert cluster_by_bounds([5, 40, 8, 999], [8, 64]) == [[0, 2], [1], [3]]


def test_splitting_pays_where_batching_gains_nothing():
    linear = parse_stages("0+1,0+1")
    assert sizes_by_cost(linear, 0, 8, num_behind=0) == [1] * 8
    flat = parse_stages("1+0,1+0")
    assert sizes_by_cost(flat, 0, 8, num_behind=0) == [8]
    between = parse_stages("1+1,1+1")
    assert len(sizes_by_cost(between, 0, 16, num_behind=0)) > len(sizes_by_cost(between, 0, 16, num_behind=200)) == 1


def test_a_later_split_is_foreseen():
    """The first stage wants the whole batch, the second single requests: it is not split before the first."""
    model = parse_stages("4+0,0+1")
    assert sizes_by_cost(model, 0, 4, num_behind=0) == [4]
    assert sizes_by_cost(model, 1, 4, num_behind=0) == [1, 1, 1, 1]


def test_policies_are_registered_and_made_by_name():
    registry = installed_plugins().registry
    names = policy_names(registry)
    assert {"input", "operator", "load", "load-operator", "packed", "lazy", "early-exit"} <= set(names)
    for name in names:
        assert isinstance(make_policy(name, registry), Policy)
    with pytest.raises(InvalidInputError, match=r"there are: auto.*baselines zero, delay, static"):
        make_policy("inptu", registry)


class Mine(Policy):
    """A third party's."""


def test_a_third_party_policy():
    registry = Registry()
    factory = f"{__name__}:Mine"
    registry.add(PolicySpec(name="dvabatch-mine", kind="batching", help="Mine.", factory=factory), "their-package")
    import sys

    sys.modules.setdefault(__name__, sys.modules[Mine.__module__])
    assert type(make_policy("mine", registry)).__name__ == "Mine"


def test_the_automatic_choice():
    assert choose(Diversities(input=True, operator=True), can_pack=False) == "input"
    assert choose(Diversities(input=True, operator=False), can_pack=True) == "packed"
    assert choose(Diversities(input=False, operator=True), can_pack=False) == "load-operator"
    assert choose(Diversities(input=False, operator=False), can_pack=False) == "load"


def test_comp_wait_leaves_room_for_a_full_batch():
    model = parse_stages("10+1,10+1")
    assert comp_wait_s(model, 0.2, 16) == pytest.approx(0.2 - 2 * 0.052)
    assert comp_wait_s(model, 0.05, 16) == 0.0


def test_table_costs_between_and_beyond_what_was_measured():
    units = [UnitProfile(unit_name(0, length), (1, 4), (length * 1.0, length * 2.0)) for length in (10, 30)]
    costs = TableCosts(ProfileTable(tuple(units)), 1, (10, 30))
    assert costs.stage_s(0, 1, 20) == 20.0
    assert costs.stage_s(0, 4, 30) == 60.0
    assert costs.stage_s(0, 1, 5) == 10.0
    assert costs.stage_s(0, 1, 60) == 60.0


def test_operator_diversity_is_found():
    flat, linear = (1.0, 1.1, 1.2), (1.0, 4.0, 16.0)
    assert OperatorProfile((1, 4, 16), (flat, (8.0, 8.5, 9.0), linear)).prefers_differently()
    assert not OperatorProfile((1, 4, 16), (linear, linear)).prefers_differently()
    costs = OperatorProfile((1, 4, 16), (flat, linear)).costs([1])
    assert (costs.stage_s(0, 4), costs.stage_s(1, 4)) == (1.1, 4.0)
