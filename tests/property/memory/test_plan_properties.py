"""Properties of the planners on sets that Hypothesis draws, against brute force where that is possible.

The random families are those of ``mlsys bench core-memory-plan``, so what is promised here is what is measured there.
The ratio of 1.15 is promised for them, and not for every set: test_plan.py has one whose optimum is 1.25.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.core import memory_plan
from mlsys_core.memory import Lifetime, MemoryPlan, plan_offsets, plan_offsets_for_conflicts

MAX_RATIO = 1.15


@st.composite
def lifetimes_sets(draw: st.DrawFn, max_tensors: int = 40, max_nbytes: int = 2000) -> list[Lifetime]:
    """Any set at all: starts, durations and sizes drawn one by one, zero bytes and identical tensors included."""
    rows = st.tuples(st.integers(0, max_nbytes), st.integers(0, 30), st.integers(1, 12))
    return [Lifetime(n, start, start + steps) for n, start, steps in draw(st.lists(rows, max_size=max_tensors))]


alignments = st.sampled_from([1, 2, 16, 64, 512])


def meet(a: Lifetime, b: Lifetime) -> bool:
    return a.start < b.end and b.start < a.end


def assert_valid(plan: MemoryPlan, conflicts: list[tuple[int, int]]) -> None:
    """The oracle: every pair is compared, nothing is shared with the planner."""
    for i, j in conflicts:
        if plan.nbytes[i] and plan.nbytes[j]:
            apart = (
                plan.offsets[i] + plan.nbytes[i] <= plan.offsets[j]
                or plan.offsets[j] + plan.nbytes[j] <= plan.offsets[i]
            )
            assert apart, f"tensors {i} and {j} overlap in {plan}"
    assert all(offset % plan.alignment == 0 and offset >= 0 for offset in plan.offsets)
    ends = [offset + nbytes for offset, nbytes in zip(plan.offsets, plan.nbytes, strict=True)]
    assert max(ends, default=0) <= plan.peak_nbytes
    assert plan.lower_bound_nbytes <= plan.peak_nbytes <= plan.naive_nbytes


def rounded(nbytes: int, alignment: int) -> int:
    return (nbytes + alignment - 1) // alignment * alignment


@given(lifetimes_sets(), alignments)
@settings(max_examples=100)
def test_no_two_live_tensors_overlap_and_offsets_are_aligned(lifetimes: list[Lifetime], alignment: int) -> None:
    plan = plan_offsets(lifetimes, alignment)
    assert plan.nbytes == tuple(lifetime.nbytes for lifetime in lifetimes)
    pairs = itertools.combinations(range(len(lifetimes)), 2)
    assert_valid(plan, [(i, j) for i, j in pairs if meet(lifetimes[i], lifetimes[j])])


@given(lifetimes_sets(), alignments)
@settings(max_examples=60)
def test_the_lower_bound_is_what_is_alive_at_the_fullest_step(lifetimes: list[Lifetime], alignment: int) -> None:
    alive = [
        sum(rounded(other.nbytes, alignment) for other in lifetimes if other.start <= step < other.end)
        for step in range(50)
    ]
    plan = plan_offsets(lifetimes, alignment)
    assert plan.lower_bound_nbytes == max(alive)
    assert plan.naive_nbytes == sum(rounded(lifetime.nbytes, alignment) for lifetime in lifetimes)


def optimal_peak(lifetimes: list[Lifetime]) -> int:
    """The smallest peak there is: some order placed at the lowest free byte reaches it, so all orders are tried."""
    best = sum(lifetime.nbytes for lifetime in lifetimes)
    for order in itertools.permutations(lifetimes):
        placed: list[tuple[int, Lifetime]] = []
        for lifetime in order:
            offset = 0
            for begin, other in sorted(placed, key=lambda pair: pair[0]):
                if meet(lifetime, other):
                    if begin - offset >= lifetime.nbytes:
                        break
                    offset = max(offset, begin + other.nbytes)
            placed.append((offset, lifetime))
        best = min(best, max((offset + lifetime.nbytes for offset, lifetime in placed), default=0))
    return best


@given(lifetimes_sets(max_tensors=6, max_nbytes=9))
@settings(max_examples=60)
def test_tiny_plans_are_within_a_hundredth_of_the_optimum(lifetimes: list[Lifetime]) -> None:
    plan = plan_offsets(lifetimes, alignment=1)
    assert optimal_peak(lifetimes) <= plan.peak_nbytes <= 1.01 * optimal_peak(lifetimes)


@pytest.mark.parametrize("family", sorted(memory_plan.FAMILIES))
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 100))
@settings(max_examples=15)
def test_the_peak_is_near_the_lower_bound_on_random_families(family: str, seed: int, n: int) -> None:
    lifetimes = memory_plan.FAMILIES[family](np.random.default_rng(seed), n)
    plan = plan_offsets(lifetimes)
    memory_plan.check(plan, lifetimes)
    assert plan.ratio <= MAX_RATIO


@pytest.mark.parametrize("family", sorted(memory_plan.FAMILIES))
def test_the_peak_is_near_the_lower_bound_on_a_large_set(family: str) -> None:
    lifetimes = memory_plan.FAMILIES[family](np.random.default_rng(1), 2500)
    plan = plan_offsets(lifetimes)
    memory_plan.check(plan, lifetimes)
    assert plan.ratio <= MAX_RATIO


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 150))
@settings(max_examples=15)
def test_nested_lifetimes_and_equal_sizes_are_planned_optimally(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    assert plan_offsets(memory_plan.nested(rng, n)).ratio == 1.0
    equal = [Lifetime(64, lifetime.start, lifetime.end) for lifetime in memory_plan.uniform(rng, n)]
    assert plan_offsets(equal).ratio == 1.0


@given(lifetimes_sets(max_tensors=30), alignments)
@settings(max_examples=60)
def test_conflicts_taken_from_lifetimes_give_plans_as_valid(lifetimes: list[Lifetime], alignment: int) -> None:
    pairs = [(i, j) for i, j in itertools.combinations(range(len(lifetimes)), 2) if meet(lifetimes[i], lifetimes[j])]
    conflicts = [0] * len(lifetimes)
    for i, j in pairs:
        conflicts[i] |= 1 << j
        conflicts[j] |= 1 << i
    sizes = [lifetime.nbytes for lifetime in lifetimes]
    plan = plan_offsets_for_conflicts(sizes, conflicts, alignment=alignment)
    assert_valid(plan, pairs)
    by_time = plan_offsets(lifetimes, alignment)
    assert plan.lower_bound_nbytes <= by_time.lower_bound_nbytes  # a clique of intervals meets at one step


@given(st.data())
@settings(max_examples=60)
def test_any_conflict_graph_gets_a_valid_plan(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 14))
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))
    pairs = [pair for pair in itertools.combinations(range(n), 2) if data.draw(st.booleans())]
    conflicts = [0] * n
    for i, j in pairs:
        conflicts[i] |= 1 << j
        conflicts[j] |= 1 << i
    assert_valid(plan_offsets_for_conflicts(sizes, conflicts), pairs)
