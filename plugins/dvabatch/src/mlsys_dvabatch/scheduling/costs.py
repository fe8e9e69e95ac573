"""Costs of a batch in each stage, for the decisions of policies and for simulations (DVABatch, section 7.1).

Measured tables (:class:`TableCosts`) and linear stages (:class:`~mlsys_dvabatch.stages.simulated.StagedModel`) answer
alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, Self

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import ProfileTable, UnitProfile
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class StageCosts(Protocol):
    """Seconds of each stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        ...

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        """Return the seconds that ``stage`` takes for ``num`` requests, each padded to ``length`` units."""
        ...

    def __hash__(self) -> int:
        """Return a constant hash: sums over stages are cached by these costs."""
        ...


@lru_cache(maxsize=1 << 17)
def remaining_s(costs: StageCosts, stage: int, num: int, length: int = 1) -> float:
    """Return the seconds of a batch from ``stage`` to the end: the paper's T_remain."""
    return sum(costs.stage_s(index, num, length) for index in range(stage, costs.num_stages))


@lru_cache(maxsize=1 << 16)
def catch_up_s(costs: StageCosts, stages: int, num: int, length: int = 1) -> float:
    """Return the seconds of a batch through the first ``stages`` stages."""
    return sum(costs.stage_s(index, num, length) for index in range(stages))


@lru_cache(maxsize=1 << 12)
def least_request_s(costs: StageCosts, max_batch_size: int, length: int = 1) -> float:
    """Return the seconds of work per request at the best batch size: the inverse of the model's peak throughput."""
    sizes = {max_batch_size, *(2**power for power in range(max_batch_size.bit_length()))}
    costs_s: list[float] = [remaining_s(costs, 0, size, length) / size for size in sizes if size <= max_batch_size]
    return min(costs_s)


def unit_name(stage: int, length: int) -> str:
    """Return the name of the profile table's unit for ``stage`` at ``length``."""
    return f"stage {stage} at {length}"


class Entry(NamedTuple):
    """One measured time of a table."""

    stage: int
    length: int  # units, as the table's unit is called by
    size: int  # requests


class TableCosts:
    """Costs from a measured table T[stage at length][batch size].

    Linear between measured sizes and lengths; beyond the largest length proportional to the length, below the smallest
    the same as there.

    Args:
        table: holds :func:`unit_name` of every stage and length.
        num_stages: stages.
        lengths: rising; ``(1,)`` where inputs have one shape.

    Raises:
        InvalidInputError: a unit is missing.
    """

    def __init__(self, table: ProfileTable, num_stages: int, lengths: tuple[int, ...] = (1,)) -> None:
        self.table = table
        self.num_stages = num_stages
        self.lengths = lengths
        for stage in range(num_stages):
            for length in lengths:
                _ = table[unit_name(stage, length)]
        if num_stages < 1 or not lengths or list(lengths) != sorted(set(lengths)):
            raise InvalidInputError(f"num_stages={num_stages}, lengths={lengths}: at least one of each, lengths rising")
        self._cached = lru_cache(maxsize=1 << 16)(self._stage_s)

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        """See :class:`StageCosts`."""
        return self._cached(stage, num, length)

    def _stage_s(self, stage: int, num: int, length: int) -> float:
        lengths = self.lengths
        if length <= lengths[0] or len(lengths) == 1:
            return self._measured(stage, num, lengths[0])
        if length >= lengths[-1]:
            return self._measured(stage, num, lengths[-1]) * length / lengths[-1]
        right = bisect_left(lengths, length)
        short, long = lengths[right - 1], lengths[right]
        low, high = self._measured(stage, num, short), self._measured(stage, num, long)
        return low + (high - low) * (length - short) / (long - short)

    def _measured(self, stage: int, num: int, length: int) -> float:
        return self.table.seconds(unit_name(stage, length), num, extrapolate=True)

    def entries(self) -> list[Entry]:
        """Return all measured entries."""
        return [
            Entry(stage, length, size)
            for stage in range(self.num_stages)
            for length in self.lengths
            for size in self.table[unit_name(stage, length)].batch_sizes
        ]

    def entry_s(self, entry: Entry) -> float:
        """Return the measured seconds of an entry."""
        return self.table.seconds(unit_name(entry.stage, entry.length), entry.size)

    def covers(self, num: int) -> bool:
        """Return whether batches of ``num`` requests were measured, so that they tell of entries."""
        return num <= self.table[unit_name(0, self.lengths[0])].batch_sizes[-1]

    def work(self, num: Vector, length: Vector) -> Vector:
        """Return what a batch's seconds may grow with, [3, batches]: a start, its units, and attention."""
        return np.stack([np.ones_like(num), num * length, num * length * length])

    def place(self, num: Vector, length: Vector) -> Vector:
        """Return where batches lie in the table, [2, batches]: requests and units."""
        return np.stack([num, np.maximum(length, self.lengths[0])])

    def units_of_entry(self, entry: Entry) -> float:
        """Return the units of each request of the batch that an entry is of."""
        return entry.length

    def units_of_each(self, lengths: Sequence[int], padded_length: int) -> float:
        """Return the length by which a batch is looked up, in units."""
        return padded_length

    def replaced(self, seconds: Mapping[Entry, float]) -> Self:
        """Return costs with other seconds of all entries."""
        units = []
        for stage in range(self.num_stages):
            for length in self.lengths:
                sizes = self.table[unit_name(stage, length)].batch_sizes
                values = tuple(seconds[Entry(stage, length, size)] for size in sizes)
                units.append(UnitProfile(unit_name(stage, length), sizes, values))
        return type(self)(ProfileTable(tuple(units)), self.num_stages, self.lengths)


class PackedCosts(TableCosts):
    """Costs of batches without padding, from a measured table T[stage at all units of a batch][its requests].

    A batch costs what its units cost together, and its attention the less the more requests share them. Linear between
    measured sizes; more requests than were measured cost what the most that were do.

    Args:
        table: holds :func:`unit_name` of every stage and number of units, and the seconds by requests that share them.
        num_stages: stages.
        lengths: units of a batch, rising.

    Raises:
        InvalidInputError: a unit is missing.
    """

    def _stage_s(self, stage: int, num: int, length: int) -> float:
        return super()._stage_s(stage, num, num * length)

    def _measured(self, stage: int, num: int, length: int) -> float:
        unit = unit_name(stage, length)
        return self.table.seconds(unit, min(num, self.table[unit].batch_sizes[-1]))

    def covers(self, num: int) -> bool:
        """Return True: more requests cost what the most that were measured do."""
        return True

    def place(self, num: Vector, length: Vector) -> Vector:
        """Return where batches lie in the table, [2, batches]: requests and all their units."""
        most = self.table[unit_name(0, self.lengths[0])].batch_sizes[-1]
        return np.stack([np.minimum(num, most), np.maximum(num * length, self.lengths[0])])

    def units_of_each(self, lengths: Sequence[int], padded_length: int) -> float:
        """Return the mean length, in units."""
        return sum(lengths) / len(lengths)

    def units_of_entry(self, entry: Entry) -> float:
        """Return the units of each request of the batch that an entry is of."""
        return entry.length / entry.size
