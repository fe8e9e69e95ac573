"""Linear costs of stages, for simulations and tests: seconds that grow with the batch size (DVABatch, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LinearStage(NamedTuple):
    """A stage that takes ``fixed_s + per_item_s * batch_size`` seconds."""

    fixed_s: float  # seconds of any batch: launches, weights read
    per_item_s: float  # seconds for each request


@dataclass(frozen=True, slots=True)
class StagedModel:
    """Costs of stages, in order; see :class:`~mlsys_dvabatch.scheduling.costs.StageCosts`.

    Example:
        >>> round(StagedModel((LinearStage(0.002, 0.001), LinearStage(0.002, 0.0))).seconds(4), 6)
        0.008
    """

    stages: tuple[LinearStage, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        """Return the seconds of ``num`` requests in one stage, for any length."""
        fixed_s, per_item_s = self.stages[stage]
        return fixed_s + per_item_s * num

    def seconds(self, batch_size: int) -> float:
        """Return the seconds of a batch through all stages."""
        return sum(self.stage_s(stage, batch_size) for stage in range(self.num_stages))


def parse_stages(text: str) -> StagedModel:
    """Return the model of a text ``"FIXED+PER_REQUEST,..."`` in milliseconds, one part for each stage.

    Example:
        >>> parse_stages("4+0.5,2+1").stages[1]
        LinearStage(fixed_s=0.002, per_item_s=0.001)
    """
    parts = (part.split("+") for part in text.split(","))
    return StagedModel(tuple(LinearStage(float(fixed) / 1e3, float(per_item) / 1e3) for fixed, per_item in parts))
