"""Partial least squares and canonical correlation: predictions and projections from the same centred rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.kernel.decompose import parameter
from torch import Tensor


class LatentRegressor(PredictorModule):
    """Linear regressor that also projects; its scores are predictions and projected rows side by side.

    Args:
        mean: Mean of the features, ``[features]``.
        scale: Divisor of the centred features before the projection, ``[features]``.
        weight: Weights of the centred features, ``[outputs, features]``.
        bias: ``[outputs]``.
        rotations: Projection of the centred and scaled rows, ``[components, features]``.
        is_flat: Whether the source answers ``[rows]``.
        answers: The methods of the source.
    """

    task: Task = "regression"

    def __init__(
        self,
        mean: npt.ArrayLike,
        scale: npt.ArrayLike,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike,
        rotations: npt.ArrayLike,
        *,
        is_flat: bool,
        answers: Sequence[str] = ("predict", "transform"),
    ) -> None:
        super().__init__(answers=answers)
        self.mean, self.scale, self.weight = parameter(mean), parameter(scale), parameter(weight)
        self.bias, self.rotations = parameter(bias), parameter(rotations)
        self.is_flat = is_flat

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, outputs + components]``."""
        centred = x - self.mean
        return torch.cat([centred @ self.weight.T + self.bias, centred / self.scale @ self.rotations.T], dim=1)

    def features(self, scores: Tensor) -> Tensor:
        """Return projected rows ``[rows, components]``."""
        return scores[:, len(self.weight) :]

    def prediction(self, scores: Tensor) -> Tensor:
        """Return ``[rows]`` or ``[rows, outputs]``."""
        values = scores[:, : len(self.weight)]
        return values.squeeze(1) if self.is_flat and values.shape[1] == 1 else values
