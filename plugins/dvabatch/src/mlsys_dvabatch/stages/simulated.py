"""Stages of a sliced model and what a batch costs in each (DVABatch, sections 4 and 7.1).

Plain data, read by the policies and by simulations. Measured stages come as a core
:class:`~mlsys_core.profiling.profile_table.ProfileTable`; here are stages whose time is linear in the batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class LinearStage:
    """A stage that takes ``fixed_s + per_item_s * batch_size`` seconds.

    Raises:
        InvalidInputError: a time is negative or not finite, or both are 0.
    """

    fixed_s: float  # seconds of any batch: launches, weights read
    per_item_s: float  # seconds for each request

    def __post_init__(self) -> None:
        times_s = (self.fixed_s, self.per_item_s)
        if not all(0 <= time_s < math.inf for time_s in times_s) or sum(times_s) == 0:
            raise InvalidInputError(
                f"a stage of {self.fixed_s} s and {self.per_item_s} s per request: both must be finite, 0 or more, and "
                "at least one above 0"
            )

    def seconds(self, batch_size: int) -> float:
        """Return the seconds of a batch."""
        return self.fixed_s + self.per_item_s * batch_size


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model as its stages, in order; a batch that enters the first leaves the last.

    Raises:
        InvalidInputError: there is no stage.

    Example:
        >>> model = StagedModel((LinearStage(0.002, 0.001), LinearStage(0.002, 0.0)))
        >>> round(model.seconds(4), 6), round(model.peak_rps(4))
        (0.008, 500)
    """

    stages: tuple[LinearStage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise InvalidInputError("a model needs at least one stage")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        """Return the seconds of ``num`` requests in one stage, for any length.

        See :mod:`mlsys_dvabatch.scheduling.costs`.
        """
        return self.stages[stage].seconds(num)

    def seconds(self, batch_size: int) -> float:
        """Return the seconds of a batch through all stages."""
        return sum(stage.seconds(batch_size) for stage in self.stages)

    def peak_rps(self, batch_size: int) -> float:
        """Return the requests per second when batches of ``batch_size`` run back to back, one at a time."""
        return batch_size / self.seconds(batch_size)


def parse_stages(text: str) -> StagedModel:
    """Return the model of a text ``"FIXED+PER_REQUEST,..."`` in milliseconds, one part for each stage.

    Raises:
        InvalidInputError: the text is not of that form, or a time is out of range.

    Example:
        >>> parse_stages("4+0.5, 2+1").stages[1]
        LinearStage(fixed_s=0.002, per_item_s=0.001)
    """
    stages = []
    for part in text.split(","):
        fixed_ms, plus, per_item_ms = part.partition("+")
        try:
            times_s = float(fixed_ms) / 1e3, float(per_item_ms if plus else 0.0) / 1e3
        except ValueError:
            raise InvalidInputError(
                f"{part.strip()!r} in {text!r} is no stage: write its milliseconds as FIXED+PER_REQUEST, like 4+0.5"
            ) from None
        stages.append(LinearStage(*times_s))
    return StagedModel(tuple(stages))
