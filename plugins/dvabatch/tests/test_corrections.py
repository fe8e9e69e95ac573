"""Costs of a spoiled profile, corrected by what batches take: the plans of a clean profile come back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.loop import ServeRequest, SimulatedExecutor, simulate
from mlsys_core.profiling import ProfileCache, ProfileKey, ProfileTable, UnitProfile
from mlsys_dvabatch.scheduling.corrections import FIRST_LOOK, Corrections
from mlsys_dvabatch.scheduling.costs import PackedCosts, TableCosts, unit_name
from mlsys_dvabatch.scheduling.policies.decisions import cluster
from mlsys_dvabatch.scheduling.policies.input import PackedPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, task_s
from mlsys_dvabatch.scheduling.tasks import StageOutput
from mlsys_dvabatch.stages.profile import StoredProfile

UNITS, SHARERS, SIZES = (8, 16, 32, 64, 128, 256, 512), (1, 2, 4, 16), (1, 2, 4, 8)


def true_s(units: float, num: float) -> float:
    return 1e-3 + 2e-5 * units + 1e-7 * units**2 / num


def clean() -> PackedCosts:
    rows = [UnitProfile(unit_name(0, each), SHARERS, tuple(true_s(each, num) for num in SHARERS)) for each in UNITS]
    return PackedCosts(ProfileTable(tuple(rows)), 1, UNITS)


def spoiled(costs: TableCosts, seed: int) -> Any:
    draw = random.Random(seed)
    return costs.replaced({entry: costs.entry_s(entry) * draw.uniform(1.5, 4) for entry in costs.entries()})


def padded() -> TableCosts:
    rows = [UnitProfile(unit_name(0, length), SIZES, tuple(true_s(length * n, n) for n in SIZES)) for length in UNITS]
    return TableCosts(ProfileTable(tuple(rows)), 1, UNITS)


def learnt(costs: TableCosts, truth: TableCosts, num: int, seed: int, *, busy: float = 0.0) -> Corrections:
    """Show batches of all sizes what they take; a share of them meets a busy machine."""
    corrections, draw = Corrections(costs), random.Random(seed)
    for _ in range(num):
        size, length = draw.randint(1, 20), draw.randint(2, 60)
        factor = draw.uniform(1.2, 3) if draw.random() < busy else 1.0
        corrections.observe(0, size, length, truth.stage_s(0, size, length) * factor)
    return corrections


@pytest.mark.parametrize("make", [clean, padded])
@pytest.mark.parametrize(("seed", "busy"), [(0, 0.0), (1, 0.0), (2, 0.15)])
def test_a_spoiled_profile_makes_the_plans_of_a_clean_one(make: Any, seed: int, busy: float):
    truth, draw = make(), random.Random(seed)
    wrong = spoiled(truth, seed)
    right = learnt(wrong, truth, 2000, seed, busy=busy).costs()
    made = {"right": 0.0, "clean": 0.0}
    for _ in range(60):  # waiting requests in batches of least waiting, by each of the costs; what that really takes
        lengths = [draw.randint(2, 60) for _ in range(draw.randint(2, 24))]
        for name, costs in {"right": right, "clean": truth}.items():

            def batch_s(num: int, longest: int, units: int, costs: TableCosts = costs) -> float:
                return costs.stage_s(0, num, max(1, round(units / num)) if make is clean else longest)

            for places in cluster(batch_s, lengths, num_behind=8):
                units = [lengths[place] for place in places]
                each = max(1, round(sum(units) / len(units))) if make is clean else max(units)
                made[name] += truth.stage_s(0, len(units), each)
    assert made["right"] < (1.08 if busy else 1.02) * made["clean"]


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.integers(1, 600), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=60,
    ),
    st.floats(1e-5, 1e2),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_seen_costs_are_positive_and_the_same_again(seen: list[tuple[int, int, float]], usual: float):
    for costs in (clean(), padded()):
        first, second = Corrections(costs), Corrections(costs)
        for num, length, seconds in seen:
            for each in (first, second):
                each.observe(0, num, length, seconds)
                each.observe(0, num, length, usual)
        made = first.costs()
        assert made.table == second.costs().table
        assert all(made.entry_s(entry) < 1e9 for entry in costs.entries())  # a table holds no others than positive ones


def test_batches_beyond_the_measured_sizes_tell_nothing_of_padded_entries():
    corrections = Corrections(padded())
    corrections.observe(0, 9, 8, 1.0)
    assert corrections.num_observed == 0
    assert corrections.costs().table.units == padded().table.units


def test_pauses_and_a_busy_while_change_little_and_a_slower_machine_is_believed_in_time():
    truth = clean()
    calm = learnt(truth, truth, 600, 1, busy=0.3).costs()
    assert all(0.8 < calm.entry_s(each) / truth.entry_s(each) < 1.3 for each in truth.entries())
    slower = truth.replaced({entry: 2 * truth.entry_s(entry) for entry in truth.entries()})
    assert learnt(truth, slower, 1500, 1).costs().stage_s(0, 4, 20) == pytest.approx(slower.stage_s(0, 4, 20), rel=0.1)


def test_a_size_that_looks_dear_and_was_never_tried_is_tried():
    truth = padded()
    wrong = truth.replaced({e: truth.entry_s(e) * (4 if e.size == 8 else 1.5 + e.size % 2) for e in truth.entries()})
    corrections = Corrections(wrong)
    for _ in range(40):
        for size in (1, 2, 4):
            corrections.observe(0, size, 32, truth.stage_s(0, size, 32))
    eight = corrections.costs().stage_s(0, 8, 32)
    assert eight / 8 < corrections.costs().stage_s(0, 4, 32) / 4 < wrong.stage_s(0, 8, 32) / 8


def served(costs: PackedCosts, corrections: Corrections | None) -> tuple[DvaScheduler, float]:
    """Serve requests as fast as they go, and return the scheduler and the seconds of the last half."""
    draw, truth = random.Random(5), clean()
    requests = [(n * 4e-4, ServeRequest(str(n), None, length=draw.randint(2, 60))) for n in range(1600)]
    scheduler = DvaScheduler(PackedPolicy(), costs, max_batch_size=64, corrections=corrections)

    def real_s(task: Any) -> float:
        units = sum(request.length for request in task.requests)
        return task_s(truth, task) if not units else truth.stage_s(0, task.num, max(1, round(units / task.num)))

    def output(task: Any) -> StageOutput:
        return StageOutput(results=[None] * task.num, seconds=(real_s(task),))

    run = simulate(scheduler, [SimulatedExecutor(real_s, output)], iter(requests))
    return scheduler, sum(each.latency_s for each in run.requests[800:])


def test_a_server_with_a_spoiled_profile_soon_serves_like_one_with_a_clean_one():
    told: list[str] = []
    wrong = spoiled(clean(), 3)
    scheduler, corrected_s = served(wrong, Corrections(wrong, told=told.append))
    _, clean_s = served(clean(), None)
    assert corrected_s < 1.05 * clean_s
    assert "costs corrected by" in told[0]
    assert scheduler.counters["corrected costs"] == len(told)
    still = Corrections(clean(), told=told.append)
    served(clean(), still)
    assert still.published is still.measured, "true costs are left alone"
    assert still.num_observed > FIRST_LOOK


def test_corrected_costs_are_stored_and_what_was_never_wrong_is_not_written(tmp_path: Path):
    cache, key = ProfileCache(tmp_path), ProfileKey.of("cpu", {}, "x")
    wrong = spoiled(clean(), 3)
    profile = StoredProfile(wrong, cache, key, share_of_others=0.45, spread=0.2)
    assert "45% of the machine; repeats differed by 20%; serving corrects them" in profile.describe()
    profile.keep(Corrections(wrong))
    assert cache.get(key) is None
    corrections = Corrections(wrong)
    served(wrong, corrections)
    profile.keep(corrections)
    kept = cache.get(key)
    assert kept == corrections.costs().table
    assert kept != wrong.table
    assert cache.notes(key) == {"share of others": 0.45, "median spread": 0.2, "batches": corrections.num_observed}
