"""Offsets in one arena for tensors whose lifetimes are known ahead of time.

A planner: plain data in, a frozen :class:`MemoryPlan` out, no torch. Ahead-of-time schedules (Nimble) reserve their
memory by it once and find each buffer by its offset; :class:`mlsys_core.memory.arena.Arena` turns it into tensors. The
search itself is in :mod:`mlsys_core.memory.placement`. Parallel streams have no common order of steps: for them
:func:`plan_offsets_for_conflicts` takes the pairs that may be alive at one time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlsys_core.errors import InvalidInputError
from mlsys_core.memory.placement import Rows, Units, greedy_orders, search


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One tensor: its size and the steps during which it must be kept.

    Attributes:
        nbytes: size in bytes, 0 or more.
        start: the schedule step that first writes it (inclusive).
        end: the first schedule step that no longer needs it (exclusive), after ``start``.

    Raises:
        InvalidInputError: a field is not an integer, the size is negative, or ``start >= end``.

    Example:
        >>> Lifetime(1024, start=0, end=2)  # written by step 0, last read by step 1
        Lifetime(nbytes=1024, start=0, end=2)
    """

    nbytes: int
    start: int
    end: int

    def __post_init__(self) -> None:
        for name in ("nbytes", "start", "end"):
            object.__setattr__(self, name, as_integer(getattr(self, name), f"Lifetime.{name}"))
        if self.nbytes < 0:
            raise InvalidInputError(f"Lifetime.nbytes is {self.nbytes}: a size in bytes is 0 or more")
        if self.start >= self.end:
            raise InvalidInputError(
                f"Lifetime(start={self.start}, end={self.end}) is empty: end is exclusive and must be after start; "
                f"a tensor used only in step {self.start} has end={self.start + 1}"
            )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Offset of each tensor in one arena. All quantities are bytes; tuples are in the order of the input."""

    offsets: tuple[int, ...]  # multiples of ``alignment``; 0 for tensors of no bytes
    nbytes: tuple[int, ...]  # sizes as given, not rounded
    alignment: int  # a power of two; sizes count rounded up to it
    peak_nbytes: int  # size of the arena
    lower_bound_nbytes: int  # no plan can be smaller: what is alive at one time
    naive_nbytes: int  # total of one allocation per tensor

    @property
    def ratio(self) -> float:
        """Peak over lower bound: 1.0 is optimal. 1.0 for a plan of no bytes."""
        return self.peak_nbytes / self.lower_bound_nbytes if self.lower_bound_nbytes else 1.0

    def __str__(self) -> str:
        saved = 1 - self.peak_nbytes / self.naive_nbytes if self.naive_nbytes else 0.0
        return (
            f"{len(self.offsets)} tensors in {format_nbytes(self.peak_nbytes)} "
            f"({self.ratio:.3f}x the lower bound of {format_nbytes(self.lower_bound_nbytes)}, "
            f"{saved:.1%} less than {format_nbytes(self.naive_nbytes)} without reuse), "
            f"aligned to {self.alignment} B"
        )


def plan_offsets(lifetimes: Sequence[Lifetime], alignment: int = 64) -> MemoryPlan:
    """Place tensors in one arena so that no two overlap both in time and in space.

    Tries several orders (by size, by start with best fit, by size times conflicts, by conflicts), each greedily
    against the tensors alive at the same time, keeps the best and improves it with squeaky wheel rounds.
    Deterministic, and bounded in work rather than in time. ``docs/memory.md`` has the ratios and times measured.

    Args:
        lifetimes: one per tensor, any number, in any order.
        alignment: offsets are multiples of it, sizes count rounded up to it; bytes, a power of two.

    Returns:
        The plan. ``lower_bound_nbytes`` is the largest sum of rounded sizes alive at one step.

    Raises:
        InvalidInputError: ``alignment`` is not a power of two, or the sizes add up to more than an int64 holds.

    Example:
        >>> plan = plan_offsets([Lifetime(256, 0, 2), Lifetime(64, 1, 3), Lifetime(128, 2, 4)])
        >>> plan.offsets, plan.peak_nbytes, plan.naive_nbytes
        ((0, 256, 0), 320, 448)
    """
    nbytes = [lifetime.nbytes for lifetime in lifetimes]
    sizes, kept = to_units(nbytes, alignment)
    if not kept:
        return make_plan(nbytes, alignment, kept, [], 0)
    steps = sorted({step for i in kept for step in (lifetimes[i].start, lifetimes[i].end)})
    rank = {step: k for k, step in enumerate(steps)}  # dense: any integers will do as steps
    starts = np.array([rank[lifetimes[i].start] for i in kept], np.int32)
    ends = np.array([rank[lifetimes[i].end] for i in kept], np.int32)

    change = np.zeros(len(steps), np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends, sizes)
    lower_bound = int(change.cumsum().max())

    first, last = starts.tolist(), ends.tolist()

    def overlapping(i: int) -> npt.NDArray[np.bool_]:
        overlap: npt.NDArray[np.bool_] = (starts < last[i]) & (ends > first[i])
        return overlap

    started_before_end = np.searchsorted(np.sort(starts), ends)
    ended_by_start = np.searchsorted(np.sort(ends), starts, side="right")
    orders = greedy_orders(sizes, started_before_end - ended_by_start)
    orders.insert(1, (np.lexsort((-sizes, starts)).tolist(), True))
    offsets = search(sizes, overlapping, orders, lower_bound)
    return make_plan(nbytes, alignment, kept, offsets.tolist(), lower_bound)


def format_nbytes(nbytes: int) -> str:
    """Return ``nbytes`` as readable text in binary units.

    Example:
        >>> format_nbytes(1536)
        '1.5 KiB'
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def as_integer(value: object, name: str) -> int:
    """Return ``value`` as a plain int; numpy's integers pass, floats do not."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(f"{name} is {value!r}: give an integer") from None


def to_units(nbytes: Sequence[int], alignment: int) -> tuple[Units, list[int]]:
    """Return rounded-up sizes in units of ``alignment`` of the non-empty tensors, and those tensors' indices."""
    alignment = as_integer(alignment, "alignment")
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidInputError(f"alignment is {alignment}: give a power of two in bytes, such as 64")
    kept = [i for i, size in enumerate(nbytes) if size]
    units = [-(-nbytes[i] // alignment) for i in kept]
    total_nbytes = sum(units) * alignment
    if total_nbytes > np.iinfo(np.int64).max:
        raise InvalidInputError(f"the tensors add up to {total_nbytes} bytes: at most 2**63 - 1 can be planned")
    return np.array(units, np.int64), kept


def make_plan(
    nbytes: Sequence[int], alignment: int, kept: Sequence[int], unit_offsets: Sequence[int], lower_bound: int
) -> MemoryPlan:
    """Return the plan in bytes, from offsets of the ``kept`` tensors and a lower bound in units of ``alignment``."""
    offsets = [0] * len(nbytes)
    for i, offset in zip(kept, unit_offsets, strict=True):
        offsets[i] = offset * alignment
    rounded = [-(-size // alignment) * alignment for size in nbytes]
    return MemoryPlan(
        offsets=tuple(offsets),
        nbytes=tuple(nbytes),
        alignment=alignment,
        peak_nbytes=max(map(operator.add, offsets, rounded), default=0),
        lower_bound_nbytes=lower_bound * alignment,
        naive_nbytes=sum(rounded),
    )


CLIQUE_STARTS = 10  # tensors from which the lower bound grows cliques


def plan_offsets_for_conflicts(nbytes: Sequence[int], conflicts: Sequence[int], *, alignment: int = 64) -> MemoryPlan:
    """Place tensors when no single order of steps says which of them are alive together.

    For schedules on several streams: two tensors may share space only if one is dead before the other is born in
    *every* run that the synchronisation allows. The same search as :func:`mlsys_core.memory.plan.plan_offsets`.

    Args:
        nbytes: size per tensor, 0 or more.
        conflicts: one bitset per tensor; bit ``j`` of ``conflicts[i]`` is set if tensors ``i`` and ``j`` must not share
            space. Symmetric; bit ``i`` of ``conflicts[i]`` does not matter.
        alignment: offsets are multiples of it, sizes count rounded up to it; bytes, a power of two.

    Returns:
        The plan. ``lower_bound_nbytes`` is the heaviest set of mutually conflicting tensors that a greedy search finds:
        a true bound, though not always the largest.

    Raises:
        InvalidInputError: lengths differ, a size is negative, a bitset names a tensor that is not there or is not
            symmetric, or ``alignment`` is not a power of two.

    Example:
        >>> plan_offsets_for_conflicts([64, 64, 64], [0b010, 0b101, 0b010]).offsets  # 0 and 2 never meet
        (64, 0, 64)
    """
    if len(nbytes) != len(conflicts):
        raise InvalidInputError(f"got {len(nbytes)} sizes and {len(conflicts)} bitsets: give one bitset per tensor")
    nbytes = [as_integer(size, f"nbytes[{i}]") for i, size in enumerate(nbytes)]
    for i, size in enumerate(nbytes):
        if size < 0:
            raise InvalidInputError(f"nbytes[{i}] is {size}: a size in bytes is 0 or more")
    sizes, kept = to_units(nbytes, alignment)
    bits = _packed([as_integer(bitset, f"conflicts[{i}]") for i, bitset in enumerate(conflicts)])
    if not kept:
        return make_plan(nbytes, alignment, kept, [], 0)

    def conflicting(k: int) -> npt.NDArray[np.bool_]:
        bools = np.unpackbits(bits[kept[k]], count=len(nbytes), bitorder="little").view(np.bool_)
        return bools if len(kept) == len(nbytes) else bools[kept]

    degrees, weights = np.zeros(len(kept), np.int64), sizes.copy()
    for k in range(len(kept)):
        row = conflicting(k)
        degrees[k] = np.count_nonzero(row)
        weights[k] += sizes[row].sum()
    lower_bound = _clique_bound(sizes, conflicting, weights)
    offsets = search(sizes, conflicting, greedy_orders(sizes, degrees), lower_bound)
    return make_plan(nbytes, alignment, kept, offsets.tolist(), lower_bound)


def _packed(conflicts: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the checked bitsets as ``uint8[n, ceil(n / 8)]``."""
    n = len(conflicts)
    width = -(-n // 8)
    for i, bitset in enumerate(conflicts):
        if not 0 <= bitset < 1 << n:
            raise InvalidInputError(
                f"conflicts[{i}] names a tensor that is not there: use bits 0 to {n - 1} of an int that is 0 or more"
            )
    joined = b"".join(bitset.to_bytes(width, "little") for bitset in conflicts)
    bits = np.frombuffer(joined, np.uint8).reshape(n, width)
    for begin in range(0, n, 1024):  # a block of rows against the same block of columns: 1024 n bytes, not n squared
        block = np.unpackbits(bits[begin : begin + 1024], axis=1, count=n, bitorder="little")
        columns = np.packbits(block.T, axis=1, bitorder="little")
        differs = (bits[:, begin // 8 : begin // 8 + columns.shape[1]] != columns).any(axis=1)
        if differs.any():
            i = int(differs.argmax())
            raise InvalidInputError(
                f"conflicts is not symmetric at tensor {i}: bit j of conflicts[{i}] and bit {i} of conflicts[j] "
                f"must be the same for every j"
            )
    return bits


def _clique_bound(sizes: Units, row: Rows, weights: Units) -> int:
    """Return the units of the heaviest clique that greedy growth finds, from the heaviest neighbourhoods.

    ``weights[k]`` is at least the weight of any clique with tensor ``k``: those that cannot beat the best are skipped.
    """
    starts = np.argsort(-weights, kind="stable")[:CLIQUE_STARTS].tolist()
    best = 0
    for preference in (
        sizes.astype(float) * weights,
        weights,
        sizes,
    ):  # each fails on some family, together they do well
        preferred = np.argsort(-preference, kind="stable")
        for k in starts:
            if weights[k] <= best:
                break
            weight, grown, candidates = 0, k, preferred
            while True:
                weight += int(sizes[grown])
                candidates = candidates[row(grown)[candidates]]
                candidates = candidates[candidates != grown]
                if not candidates.size:
                    break
                grown = int(candidates[0])
            best = max(best, weight)
    return best
