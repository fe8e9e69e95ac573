"""Gains by policies, in simulations of hundreds and thousands of requests."""

from __future__ import annotations

import pytest
from mlsys_bench.dvabatch.cases import Case, Costed, best_static, capped, run_case, zero_batch
from mlsys_bench.dvabatch.workloads import poisson_trace
from mlsys_dvabatch.scheduling.costs import least_request_s, remaining_s
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.planner import Planner
from mlsys_dvabatch.stages.simulated import parse_stages

MIXED = parse_stages("4+0.1,1+1,1+1,1+1")


@pytest.mark.parametrize("load", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("stages_ms", ["4+0.1,1+1,1+1,1+1", "0.2+2,0.2+2,0.2+2,0.2+2", "6+0.05,6+0.05,6+0.05,6+0.05"])
def test_cost_aware_policies_are_hardly_ever_worse_than_zero_batch(stages_ms: str, load: float):
    """In the costs' own world: at most 5 % worse than ZeroBatch, whatever the shape; the literal rule is up to 3x."""
    costs = parse_stages(stages_ms)
    rate = load * 64 / remaining_s(costs, 0, 64)
    trace = poisson_trace(rate, [1] * 800, lambda _: None)
    zero = run_case(zero_batch(), Costed(costs), trace)
    for policy in (LoadOperatorPolicy, LoadPolicy):
        assert run_case(Case("DVABatch", policy), Costed(costs), trace).mean_s <= 1.05 * zero.mean_s
    assert best_static(Costed(costs), trace).mean_s <= zero.mean_s


@pytest.mark.parametrize("size", [16, 64])
def test_its_mean_is_no_more_than_that_of_batches_as_they_come(size: int):
    """Simulated for 20,000 requests, which leaves an error of a few percent."""
    planned = Planner(MIXED, 64, 0.7 / least_request_s(MIXED, 64))
    trace = poisson_trace(planned.rate, [1] * 20_000, lambda _: None)
    assert planned.mean_s <= 1.05 * run_case(capped(size), Costed(MIXED), trace).mean_s
