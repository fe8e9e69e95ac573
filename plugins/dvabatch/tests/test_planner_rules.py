"""The planner's equations and its decisions, pinned: what is best at a load does not change unseen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mlsys_dvabatch.scheduling.costs import StageCosts, least_request_s
from mlsys_dvabatch.scheduling.policies.planner import Planner, planner_for, poisson
from mlsys_dvabatch.stages.simulated import parse_stages


class ByLength:
    """Three stages, each dearer than the one before for each padded unit."""

    num_stages = 3

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        return 0.004 + 0.0002 * (stage + 1) * num * length


MIXED, WEIGHTS = parse_stages("4+0.1,1+1,1+1,1+1"), parse_stages("6+0.05,6+0.05,6+0.05,6+0.05")
COSTS: dict[str, tuple[StageCosts, int, int]] = {
    "mixed": (MIXED, 1, 16),
    "weights": (WEIGHTS, 1, 16),
    "length": (ByLength(), 4, 80),
}


def planner(name: str, load: float) -> Planner:
    costs, length, most = COSTS[name]
    return planner_for(costs, most, load, length)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_its_values_solve_the_equation_of_optimality(name: str, load: float):
    """Bellman's, of a semi-Markov decision process, for every queue that a batch can empty; arrivals summed one by one.

    V(q) + g s = min over batches of n <= q, which wait w in all and take s:
    w + (q - n + r s / 2) s + sum over k of P(k arrivals in s) V(q - n + k).
    """
    planned = planner(name, load)
    values, gain, rate = planned._values, planned._gain, planned.rate
    assert values[0] == 0.0
    assert values[1] == pytest.approx(gain / rate), "with nobody here one has to wait for the next"
    for waiting in (1, 2, 3, 7, 16, 40):
        ways = []
        for num, waited_s, work_s in planned._ways:
            if num > waiting:
                continue
            left, mean = waiting - num, rate * work_s
            later = sum(
                math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) * values[left + k] for k in range(150)
            )
            ways.append(waited_s + (left + mean / 2) * work_s - gain * work_s + later)
        assert values[waiting] == pytest.approx(min(ways), rel=1e-6, abs=1e-9)


def test_ways_of_whole_batches():
    """Sizes are all up to 64, then every eighth, and the largest; each way's waiting is at least its work."""
    for most, tail in (
        (1, [1]),
        (16, [15, 16]),
        (80, [64, 72, 80]),
        (75, [64, 72, 75]),
        (64, [63, 64]),
        (70, [64, 70]),
    ):
        planned = Planner(parse_stages("4+1"), most, 10.0)
        assert planned._sizes[-len(tail) :] == tail
        assert planned._sizes[: min(most, 64)] == list(range(1, min(most, 64) + 1))
    assert Planner(MIXED, 4, 10.0).length == 1
    for num, waited_s, work_s in planner("mixed", 0.3)._ways:
        assert 0 < work_s <= waited_s * (1 + 1e-9) <= num * work_s * (1 + 1e-8)
        assert work_s >= 0.004 + 0.0001 * num


@pytest.mark.parametrize(
    ("name", "load", "mean_s", "values"),
    [
        ("mixed", 0.3, 0.016321, [0.01632, 0.03712, 0.14234, 1.42654]),
        ("mixed", 0.8, 0.043307, [0.04331, 0.08805, 0.31898, 3.72352]),
        ("weights", 0.3, 0.037485, [0.03748, 0.06256, 0.14022, 0.67424]),
        ("length", 0.8, 0.09698, [0.09698, 0.19106, 0.67033, 7.5734]),
    ],
)
def test_means_and_values(name: str, load: float, mean_s: float, values: list[float]):
    planned = planner(name, load)
    assert planned.mean_s == pytest.approx(mean_s, abs=1e-6)
    assert [planned._values[waiting] for waiting in (1, 2, 5, 20)] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "load", "sizes"),
    [
        ("mixed", 0.3, [1, 2, 3, 4, 5, 5, 8, 11, 16, 16, 16, 16, 16]),
        ("mixed", 0.8, [1, 2, 3, 4, 5, 6, 8, 12, 16, 16, 16, 16, 16]),
        ("length", 0.3, [1, 2, 3, 4, 5, 6, 7, 9, 10, 13, 16, 37, 61]),
        ("length", 0.8, [1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 34, 50, 72]),
    ],
)
def test_sizes_of_new_batches(name: str, load: float, sizes: list[int]):
    planned = planner(name, load)
    assert [planned.begin(waiting) for waiting in (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 40, 90, 300)] == sizes


JOINING = {
    ("mixed", 0.3): [[0, 0, 0, 9], [0] * 4, [0] * 4, [0] * 4, [0] * 4, [0] * 4],
    ("mixed", 0.8): [[0, 2, 4, 9], [0] * 4, [0] * 4, [0, 2, 4, 9], [0] * 4, [0] * 4],
    ("weights", 0.3): [[1, 2, 4, 9], [0, 2, 4, 9], [0] * 4, [0, 0, 4, 9], [0, 0, 0, 9], [0] * 4],
    ("weights", 0.8): [[0, 2, 4, 9], [0, 0, 4, 9], [0] * 4, [0, 0, 4, 9], [0, 0, 0, 9], [0] * 4],
    ("length", 0.3): [[1, 2, 4, 7], [0, 0, 0, 5], [0] * 4, [0, 0, 0, 7], [0] * 4, [0] * 4],
    ("length", 0.8): [[1, 2, 4, 9], [0, 2, 4, 9], [0] * 4, [0, 2, 4, 9], [0, 0, 0, 9], [0] * 4],
}


@pytest.mark.parametrize(("name", "load"), JOINING)
def test_joining_requests(name: str, load: float):
    """After one stage and after two, batches of 1, 3 and 12; 1, 2, 4 and 9 wait."""
    planned = planner(name, load)
    found = [
        [planned.join(done, earlier, waiting) for waiting in (1, 2, 4, 9)] for done in (1, 2) for earlier in (1, 3, 12)
    ]
    assert found == JOINING[name, load]


def test_nobody_joins_a_full_batch_and_no_more_than_there_is_room():
    planned = planner("weights", 0.3)
    assert [planned.join(1, earlier, 9) for earlier in (16, 17)] == [0, 0]
    assert planned.join(1, 1, 300) == 15


SPLITS = {
    ("mixed", 0.3): [[[2]] * 3, [[5]] * 3, [[4, 2, 2], [8], [8]], [[2]] * 3, [[3, 2], [5], [5]], [[4, 4], [8], [8]]],
    ("mixed", 0.8): [[[2]] * 3, [[5]] * 3, [[8]] * 3, [[2]] * 3, [[5]] * 3, [[8]] * 3],
    ("length", 0.3): [[[2]] * 3, [[5]] * 3, [[8]] * 3, [[2]] * 3, [[5]] * 3, [[4, 4], [8], [8]]],
}


@pytest.mark.parametrize(("name", "load"), SPLITS)
def test_where_batches_are_split(name: str, load: float):
    """Before the second stage and the third, batches of 2, 5 and 8; 0, 10 and 100 wait."""
    planned = planner(name, load)
    found = [[planned.split(stage, num, waiting) for waiting in (0, 10, 100)] for stage in (1, 2) for num in (2, 5, 8)]
    assert found == SPLITS[name, load]


RUNS = {
    ("mixed", 0.3): [[3, 0], [0, 3], [3, 3], [1, 3], [3, 3], [2, 3]],
    ("mixed", 0.8): [[0, 0], [3, 3], [3, 1], [3, 3], [3, 2], [3, 3]],
    ("weights", 0.3): [[0, 0], [3, 0], [1, 1], [3, 3], [3, 2], [3, 3]],
    ("weights", 0.8): [[0, 0], [0, 0], [1, 1], [3, 1], [3, 2], [3, 3]],
    ("length", 0.3): [[0, 0], [1, 1], [2, 1], [1, 2], [2, 2], [2, 2]],
    ("length", 0.8): [[0, 0], [1, 0], [1, 1], [2, 2], [2, 2], [2, 2]],
}


@pytest.mark.parametrize(("name", "load"), RUNS)
def test_a_batch_runs_this_far_unasked(name: str, load: float):
    """Batches of 1 and 6 from each of the first three stages; 0 and 5 wait."""
    planned = planner(name, load)
    found = [[planned.run_to(stage, num, waiting) for waiting in (0, 5)] for stage in (0, 1, 2) for num in (1, 6)]
    assert found == RUNS[name, load]


def test_a_run_is_no_longer_than_the_longest():
    """Two stages of 10 ms are 20 ms, which is the most; nobody is likely to come."""
    for stage_ms, last in ((9.99, 2), (10.01, 1), (20.01, 0)):
        model: Any = parse_stages(",".join([f"{stage_ms}+0"] * 4))
        assert Planner(model, 8, 1e-6).run_to(0, 1, 0) == last


def test_chances_of_arrivals_one_by_one():
    chances = poisson(2.5)
    assert len(chances) == 193
    for number in (0, 1, 2, 5, 20):
        assert chances[number] == pytest.approx(math.exp(-2.5) * 2.5**number / math.factorial(number))
    assert poisson(0.0)[:2] == pytest.approx([1.0, 0.0])
    assert poisson(1000.0)[-1] == pytest.approx(1.0), "whatever is beyond counts as the largest number"
    assert np.all(poisson(1000.0) >= 0)


def test_planners_are_made_once_for_a_load():
    planned = planner("mixed", 0.3)
    assert planned is planner_for(MIXED, 16, 0.3, 1)
    assert planned.rate == pytest.approx(0.3 / least_request_s(MIXED, 16))
    assert (planned.max_batch_size, planner("length", 0.8).length) == (16, 4)
    assert planner("length", 0.8).rate == pytest.approx(0.8 / least_request_s(ByLength(), 80, 4))
