"""Projections on fewer columns: linear, by kernels, with a regression (partial least squares) or a density."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task, parameter
from mlsys_windtunnel.modules.kernel.kernels import Kernel
from torch import Tensor


class Projection(OperatorModule):
    """``(x - mean) @ weight.T``; mean ``[features]``, weight ``[components, features]``."""

    def __init__(self, mean: npt.ArrayLike, weight: npt.ArrayLike) -> None:
        super().__init__()
        self.mean = parameter(mean)
        self.weight = parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, components]``."""
        return (x - self.mean) @ self.weight.T


class FactorModel(PredictorModule):
    """A projection together with the normal density of its rows (Bishop, PRML, section 12.2.1).

    The scores are the centred rows; ``transform`` projects them and ``score_samples`` gives their log-density.

    Args:
        mean: ``[features]``.
        weight: ``[components, features]``.
        precision: Inverse covariance of the density, ``[features, features]``.
    """

    task: Task = "density"

    def __init__(self, mean: npt.ArrayLike, weight: npt.ArrayLike, precision: npt.ArrayLike) -> None:
        super().__init__(answers=("transform", "score_samples"))
        self.mean = parameter(mean)
        self.weight = parameter(weight)
        self.precision = parameter(precision)

    def forward(self, x: Tensor) -> Tensor:
        """Return centred rows, ``[rows, features]``."""
        return x - self.mean

    def features(self, scores: Tensor) -> Tensor:
        """Return ``[rows, components]``."""
        return scores @ self.weight.T

    def samples(self, scores: Tensor) -> Tensor:
        """Return log-densities, ``[rows]``; minus infinity where the precision is no covariance's inverse."""
        sign, logarithm = torch.linalg.slogdet(self.precision)
        volume = torch.where(sign > 0, logarithm, -torch.inf)
        mahalanobis = (scores * (scores @ self.precision)).sum(dim=1)
        return -0.5 * mahalanobis - 0.5 * (scores.shape[1] * math.log(2 * math.pi) - volume)


class KernelProjection(OperatorModule):
    """Kernel values projected, after the centring of kernel PCA where there is one.

    Args:
        kernel: With ``k`` anchors.
        weight: ``[k, components]``.
        column_means: Means of the training kernel's columns, ``[k]``; None: the kernel is not centred.
        overall_mean: Mean of the training kernel.
    """

    def __init__(
        self,
        kernel: Kernel,
        weight: npt.ArrayLike,
        *,
        column_means: npt.ArrayLike | None = None,
        overall_mean: float = 0.0,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = parameter(weight)
        self.is_centred = column_means is not None
        if column_means is not None:
            self.column_means = parameter(column_means)
            self.overall_mean = parameter(overall_mean)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, components]``."""
        values: Tensor = self.kernel(x)
        if self.is_centred:
            values = values - self.column_means - values.mean(dim=1, keepdim=True) + self.overall_mean
        return values @ self.weight


class RandomFourier(OperatorModule):
    """``sqrt(2 / components) * cos(x @ weight + offset)`` (Rahimi and Recht, NIPS 2007).

    Args:
        weight: ``[features, components]``.
        offset: ``[components]``.
        skewedness: If given, ``log(x + skewedness)`` is projected; NaN below it, where the source raises.
    """

    def __init__(self, weight: npt.ArrayLike, offset: npt.ArrayLike, *, skewedness: float | None = None) -> None:
        super().__init__()
        self.weight = parameter(weight)
        self.offset = parameter(offset)
        self.skewedness = skewedness

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, components]``."""
        x = x if self.skewedness is None else (x + self.skewedness).log()
        return math.sqrt(2 / len(self.offset)) * torch.cos(x @ self.weight + self.offset)


class LatentRegressor(PredictorModule):
    """Linear regressor that also projects; its scores are predictions and projected rows side by side.

    Args:
        mean: Mean of the features, ``[features]``.
        scale: Divisor of the centred features before the projection, ``[features]``.
        weight: Weights of the centred features, ``[outputs, features]``.
        bias: ``[outputs]``.
        rotations: Projection of the centred and scaled rows, ``[components, features]``.
        is_flat: Whether the source answers ``[rows]``.
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
