"""The planner against queueing theory, and where the answer is plain."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.costs import StageCosts, TableCosts, least_request_s, unit_name
from mlsys_dvabatch.scheduling.policies.planner import Planner, poisson
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel, parse_stages

FLAT = StagedModel((LinearStage(0.01, 0.0),) * 4)  # weights are all that costs
LINEAR = StagedModel((LinearStage(0.0, 0.01),) * 4)  # a batch costs what its requests cost alone
MIXED = parse_stages("4+0.1,1+1,1+1,1+1")


def planner(costs: StageCosts, load: float, max_batch_size: int = 64) -> Planner:
    return Planner(costs, max_batch_size, load / least_request_s(costs, max_batch_size))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_one_at_a_time_it_is_the_m_d_1_queue(load: float):
    """Batches of one of fixed length: the Pollaczek-Khinchine mean."""
    service_s = 0.04
    expected = service_s * (1 + load / (2 * (1 - load)))
    assert planner(FLAT, load, max_batch_size=1).mean_s == pytest.approx(expected, rel=1e-3)


WEIGHTS = parse_stages("6+0.05,6+0.05,6+0.05,6+0.05")


@pytest.mark.parametrize("load", [0.3, 0.6, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("costs", [WEIGHTS, MIXED, LINEAR, parse_stages("20+1,20+1,20+0,4+0.05")])
def test_more_requests_waiting_are_never_better(costs: StageCosts, load: float):
    """Values rise with the queue; so they do not where policy iteration goes round in a circle."""
    values = planner(costs, load)._values
    assert np.diff(values[:193]).min() >= -1e-9


@pytest.mark.parametrize("seed", [7, 52])
def test_costs_without_rhyme_or_reason_are_planned_for(seed: int):
    """A busy machine measures such; policy iteration came to choices that leave no equation to solve, and raised."""
    rng, sizes = np.random.default_rng(seed), (1, 2, 4, 8, 16, 32, 64)
    seconds = [np.exp(rng.uniform(np.log(1e-4), np.log(5e-2), len(sizes))) for _ in range(4)]
    units = [UnitProfile(unit_name(stage, 1), sizes, tuple(map(float, each))) for stage, each in enumerate(seconds)]
    found = planner(TableCosts(ProfileTable(tuple(units)), 4), 0.5)
    assert 0 < found.mean_s < 1
    assert all(1 <= found.begin(waiting) <= min(waiting, 64) for waiting in (1, 5, 40, 100))
    assert found.begin(100) > 1


def test_it_begins_with_what_is_cheap():
    assert [planner(FLAT, 0.5).begin(waiting) for waiting in (1, 7, 64, 100, 1000)] == [1, 7, 64, 64, 64]
    assert [planner(LINEAR, 0.5).begin(waiting) for waiting in (1, 7, 100)] == [1, 1, 1]


def test_late_requests_join_where_that_saves_work():
    assert planner(FLAT, 0.1).join(1, 1, 4) == 4
    assert planner(FLAT, 0.1).join(3, 8, 1) == 0  # eight would wait for one
    assert planner(LINEAR, 0.5).join(1, 1, 1) == 0
    assert planner(FLAT, 0.1).join(1, 63, 4) <= 1  # there is room for one


def test_it_splits_where_the_rest_wants_small_batches():
    model = parse_stages("40+0,0+10")
    assert planner(model, 0.3).split(1, 4, 0) == [1, 1, 1, 1]
    assert planner(FLAT, 0.3).split(1, 4, 0) == [4]


def test_it_runs_through_where_nobody_is_likely_to_come():
    quick = parse_stages("1+1,1+1,1+1")
    assert planner(quick, 0.01).run_to(0, 1, 0) == 2
    assert planner(parse_stages("1+0,0+1"), 0.1).run_to(0, 4, 0) == 0  # a split is due after the first
    assert planner(parse_stages("5+0,5+0,5+0,5+0"), 0.1).run_to(0, 1, 0) < 3  # others may join
    assert planner(parse_stages("100+1,100+1,100+1"), 0.01).run_to(0, 1, 0) == 0  # too long to bind oneself


def test_chances_of_arrivals():
    for mean in (0.0, 0.5, 20.0, 150.0):
        chances = poisson(mean)
        assert chances.sum() == pytest.approx(1.0)
        assert chances @ np.arange(len(chances)) == pytest.approx(mean, rel=1e-3, abs=1e-9)
