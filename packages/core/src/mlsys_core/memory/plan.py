"""Offsets in one arena for tensors whose lifetimes are known ahead of time.

A planner: plain data in, a frozen :class:`MemoryPlan` out, no torch. Ahead-of-time schedules (Nimble) reserve their
memory by it once and find each buffer by its offset; :class:`mlsys_core.memory.arena.Arena` turns it into tensors. The
search itself is in :mod:`mlsys_core.memory.placement`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlsys_core.errors import InvalidInputError
from mlsys_core.memory.placement import Units, greedy_orders, search


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
