"""Projections on fewer columns, linear and by kernels, and the Gaussian densities that factor models have with them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task
from mlsys_windtunnel.modules.kernel.kernels import Kernel
from torch import Tensor, nn


def parameter(values: npt.ArrayLike) -> nn.Parameter:
    """Make a trainable copy in float64."""
    return nn.Parameter(torch.from_numpy(np.array(values, np.float64)))


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
