"""Gaussian process classification by Laplace's approximation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from torch import Tensor, nn


class LaplaceClassifier(PredictorModule):
    """Two classes by the sign of a latent mean; probabilities by its variance (Rasmussen and Williams, algorithm 3.2).

    The logistic function is a sum of error functions (Williams and Barber, "Bayesian classification with Gaussian
    processes", 1998, appendix A). Scores are the latent mean and its variance, ``[rows, 2]``.

    Args:
        covariance: Rows and samples in, ``[rows, samples]`` out.
        points: ``[samples, features]``.
        weights: ``[samples]``: targets less probabilities.
        roots: ``[samples]``: square roots of the likelihood's curvature.
        factor: Inverse of the Cholesky factor of B, ``[samples, samples]``.
        rates: Of the error functions.
        coefficients: Of the error functions.
        classes: The two labels.
    """

    task: Task = "classification"
    roots: Tensor
    factor: Tensor
    coefficients: Tensor
    rates: Tensor

    def __init__(
        self,
        covariance: nn.Module,
        points: npt.ArrayLike,
        *,
        weights: npt.ArrayLike,
        roots: npt.ArrayLike,
        factor: npt.ArrayLike,
        rates: npt.ArrayLike,
        coefficients: npt.ArrayLike,
        classes: Sequence[object],
    ) -> None:
        super().__init__(classes=classes, answers=("predict", "predict_proba"))
        self.covariance = covariance
        self.points = nn.Parameter(torch.from_numpy(np.array(points, np.float64)))
        self.weights = nn.Parameter(torch.from_numpy(np.array(weights, np.float64)))
        for name, table in (("roots", roots), ("factor", factor), ("rates", rates), ("coefficients", coefficients)):
            self.register_buffer(name, torch.from_numpy(np.array(table, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        between = self.covariance(x, self.points)
        spread = (between * self.roots) @ self.factor.T
        variance = self.covariance.diagonal(x) - spread.square().sum(dim=1)  # type: ignore[operator]
        return torch.stack([between @ self.weights, variance], dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, 2]``."""
        mean, variance = scores[:, :1], scores[:, 1:]
        alpha = 1 / (2 * variance)
        reach = self.rates * mean * torch.sqrt(alpha / (alpha + self.rates.square()))
        integrals = torch.sqrt(math.pi / alpha) * torch.erf(reach) / (2 * torch.sqrt(variance * 2 * math.pi))
        share = (self.coefficients * integrals).sum(dim=1) + 0.5 * self.coefficients.sum()
        return torch.stack([1 - share, share], dim=1)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return (scores[:, 0] > 0).long()
