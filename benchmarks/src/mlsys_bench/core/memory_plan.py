"""Quality and speed of ``plan_offsets`` on random families of tensor lifetimes.

Run it with ``mlsys bench core-memory-plan sets=N seed=N``. For each family it plans N
small sets (2 to 200 tensors) and reports the ratio of peak to lower bound, then one set each of 1,000 and 10,000
tensors with the time, the larger also by ``plan_offsets_for_conflicts``. It fails if a plan is wrong: overlapping,
unaligned, or below the lower bound.

The property tests import the families from here, so tests and measurements use the same cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mlsys_core.memory import Lifetime, MemoryPlan, plan_offsets, plan_offsets_for_conflicts
from mlsys_core.report import Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

Family = Callable[[np.random.Generator, int], list[Lifetime]]
KIB = 1024


def uniform(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw both ends and the size uniformly: a third of all pairs overlap, the densest and slowest family."""
    ends = np.sort(rng.integers(0, 2 * n + 2, (n, 2)), axis=1)
    return [Lifetime(int(rng.integers(1, 1024 * KIB)), int(a), int(b) + 1) for a, b in ends]


def short_lived(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw uniform starts, geometric durations with a mean of 12 steps, and uniform sizes."""
    starts, durations = rng.integers(0, n, n), rng.geometric(1 / 12, n)
    return [
        Lifetime(int(rng.integers(1, 1024 * KIB)), int(s), int(s + d)) for s, d in zip(starts, durations, strict=True)
    ]


def long_tailed(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw uniform starts, Pareto durations, and log-normal sizes: a few tensors are most of the memory."""
    starts, durations = rng.integers(0, n, n), np.ceil(3 * rng.pareto(1.0, n)).clip(1, n).astype(int)
    sizes = np.ceil(rng.lognormal(10, 2, n)).astype(int)
    return [Lifetime(int(w), int(s), int(s + d)) for w, s, d in zip(sizes, starts, durations, strict=True)]


def nested(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw calls on a stack: of any two lifetimes, one holds the other or they are apart."""
    lifetimes: list[Lifetime] = []
    open_starts: list[int] = []
    step = opened = 0
    while len(lifetimes) < n:
        if opened < n and (not open_starts or rng.random() < 0.55):
            open_starts.append(step)
            opened += 1
        else:
            lifetimes.append(Lifetime(int(np.ceil(rng.lognormal(10, 1.5))), open_starts.pop(), step))
        step += 1
    return lifetimes


def few_sizes(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw sizes of 1 to 4 units of alignment, too large for gaps; lifetimes up to half of the schedule."""
    length = max(3, n)
    starts, durations = rng.integers(0, length, n), rng.integers(1, max(2, length // 2), n)
    return [Lifetime(64 * int(rng.integers(1, 5)), int(s), int(s + d)) for s, d in zip(starts, durations, strict=True)]


def network(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw a network's inference: one output a step, a fifth kept for a join; resolution falls, channels vary."""
    resolution = 112 // 2 ** np.linspace(0, 4, n).astype(int)
    channels = 16 * 2 ** rng.integers(0, 5, n)
    kept = np.where(rng.random(n) < 0.2, rng.integers(2, 20, n), 1)
    return [Lifetime(int(4 * channels[i] * resolution[i] ** 2), i, i + 1 + int(kept[i])) for i in range(n)]


def training(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw a network's training: 7 of 10 activations wait for their backward step, gradients live briefly."""
    half = n // 2
    sizes = KIB * 2 ** rng.integers(4, 10, n)
    forward = [Lifetime(int(sizes[i]), i, 2 * half - i + 1 if rng.random() < 0.7 else i + 2) for i in range(half)]
    return forward + [Lifetime(int(sizes[i]), i, i + 2 + int(rng.integers(0, 3))) for i in range(half, n)]


def tight(rng: np.random.Generator, n: int) -> list[Lifetime]:
    """Draw the adversary: sizes of 1 to 3 units packed until most steps fill a capacity of 4 to 11 units."""
    capacity = int(rng.integers(4, 12))
    load = np.zeros(max(3, 2 * n // capacity), np.int64)
    lifetimes: list[Lifetime] = []
    for _ in range(50 * n):
        if len(lifetimes) == n:
            break
        start = int(rng.integers(len(load)))
        end, units = min(len(load), start + int(rng.geometric(0.35))), int(rng.integers(1, 4))
        if (load[start:end] + units <= capacity).all():
            load[start:end] += units
            lifetimes.append(Lifetime(64 * units, start, end))
    return lifetimes


FAMILIES: dict[str, Family] = {
    family.__name__.replace("_", "-"): family
    for family in (uniform, short_lived, long_tailed, nested, few_sizes, network, training)
}
ADVERSARIES: dict[str, Family] = {"tight": tight}  # measured, but no ratio is promised


def random_size(rng: np.random.Generator, largest: int = 200) -> int:
    """Draw a number of tensors from 2 to ``largest``, uniform in its logarithm."""
    return int(np.exp(rng.uniform(np.log(2), np.log(largest + 1))))


def check(plan: MemoryPlan, lifetimes: list[Lifetime]) -> None:
    """Fail unless ``plan`` is valid, by a sweep over time that compares only tensors alive together."""
    if plan.peak_nbytes < plan.lower_bound_nbytes or any(offset % plan.alignment for offset in plan.offsets):
        raise SystemExit(f"wrong plan: {plan}")
    alive: list[int] = []
    for i in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].start):
        alive = [j for j in alive if lifetimes[j].end > lifetimes[i].start]
        begin, end = plan.offsets[i], plan.offsets[i] + plan.nbytes[i]
        if any(begin < plan.offsets[j] + plan.nbytes[j] and plan.offsets[j] < end for j in alive):
            raise SystemExit(f"wrong plan: tensor {i} overlaps another that is alive")
        if end > plan.peak_nbytes:
            raise SystemExit(f"wrong plan: tensor {i} ends above the peak")
        alive.append(i)


def conflict_bitsets(lifetimes: list[Lifetime]) -> list[int]:
    """Return overlapping lifetimes as bitsets for ``plan_offsets_for_conflicts``."""
    starts = np.array([lifetime.start for lifetime in lifetimes])
    ends = np.array([lifetime.end for lifetime in lifetimes])
    rows = ((starts < lifetime.end) & (ends > lifetime.start) for lifetime in lifetimes)
    return [int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little") for row in rows]


def measure(family: Family, *, sets: int, seed: int, sizes: Sequence[int]) -> dict[str, float]:
    """Measure ratios over ``sets`` small sets, then times and ratios of large ones."""
    ratios = []
    for k in range(sets):
        rng = np.random.default_rng([seed, k])
        lifetimes = family(rng, random_size(rng))
        plan = plan_offsets(lifetimes)
        check(plan, lifetimes)
        ratios.append(plan.ratio)
    row = {
        "ratio_median": float(np.median(ratios)),
        "ratio_p99": float(np.quantile(ratios, 0.99)),
        "ratio_worst": max(ratios),
        "share_above_1.15": float(np.mean(np.array(ratios) > 1.15)),
    }
    for n in sizes:
        lifetimes = family(np.random.default_rng(seed), n)
        started = time.perf_counter()
        plan = plan_offsets(lifetimes)
        row[f"seconds_{n}"] = time.perf_counter() - started
        check(plan, lifetimes)
        row[f"ratio_{n}"] = plan.ratio
        row[f"tensors_{n}"] = len(lifetimes)  # the adversary is full before it has so many
    nbytes, conflicts = [lifetime.nbytes for lifetime in lifetimes], conflict_bitsets(lifetimes)
    started = time.perf_counter()
    by_conflicts = plan_offsets_for_conflicts(nbytes, conflicts)
    row["seconds_conflicts"] = time.perf_counter() - started
    check(by_conflicts, lifetimes)
    row["ratio_conflicts"] = by_conflicts.peak_nbytes / plan.lower_bound_nbytes
    return row


def run(context: BenchContext, *, sets: int = 1000, seed: int = 0) -> Section:
    """Measure all families.

    Args:
        context: The suite's context.
        sets: Small sets a family.
        seed: Seed of all sets.
    """
    sizes = (1000,) if context.is_quick else (1000, 10_000)
    rows = {
        name: measure(family, sets=20 if context.is_quick else sets, seed=seed, sizes=sizes)
        for name, family in (FAMILIES | ADVERSARIES).items()
    }
    headings = [key.replace("_", " ") for key in next(iter(rows.values()))]
    table = Table(
        ["family", *headings], [[name, *(f"{each:.3g}" for each in row.values())] for name, row in rows.items()]
    )
    text = (
        f"Peak over lower bound: {sets} sets of 2 to 200 tensors a family, then one of each size. A wrong plan fails."
    )
    return Section("Core: memory plans", [text, table], data={"sets": sets, "seed": seed, "families": rows})
