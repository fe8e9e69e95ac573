"""Costs of a batch in each stage, for the decisions of policies and for simulations (DVABatch, section 7.1).

Measured tables (:class:`TableCosts`) and linear stages (:class:`~mlsys_dvabatch.stages.simulated.StagedModel`) answer
alike.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Protocol

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import ProfileTable


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
