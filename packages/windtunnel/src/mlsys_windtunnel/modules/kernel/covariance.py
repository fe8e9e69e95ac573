"""Gaussian processes: covariances, which are sums and products of a few shapes; regression and classification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task, parameter
from mlsys_windtunnel.modules.kernel.kernels import distances, squared_distances
from torch import Tensor, nn

Shape = Literal["rbf", "matern-1/2", "matern-3/2", "matern-5/2", "rational-quadratic", "periodic", "dot-product"]


class Stationary(nn.Module):
    """One shape over scaled features (Rasmussen and Williams, Gaussian Processes, section 4.2).

    Args:
        shape: Name of the function.
        length_scale: Scale of all features or of each; for ``dot-product`` the constant that is added, squared.
        extra: ``alpha`` of the rational quadratic; the period of the periodic shape.
    """

    def __init__(self, shape: Shape, length_scale: npt.ArrayLike, *, extra: float = 1.0) -> None:
        super().__init__()
        self.shape: Shape = shape
        self.length_scale = parameter(length_scale)
        if shape in ("rational-quadratic", "periodic"):
            self.extra = nn.Parameter(torch.tensor(float(extra), dtype=torch.float64))

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        """Return covariances ``[rows, anchors]``."""
        if self.shape == "dot-product":
            return x @ anchors.T + self.length_scale**2
        if self.shape == "periodic":
            waves = torch.sin(math.pi / self.extra * distances(x, anchors))
            return torch.exp(-2 * (waves / self.length_scale) ** 2)
        if self.shape == "rational-quadratic":
            return (1 + squared_distances(x, anchors) / (2 * self.extra * self.length_scale**2)) ** -self.extra
        x, anchors = x / self.length_scale, anchors / self.length_scale
        if self.shape == "rbf":
            return torch.exp(-0.5 * squared_distances(x, anchors))
        far = distances(x, anchors)
        if self.shape == "matern-1/2":
            return torch.exp(-far)
        if self.shape == "matern-3/2":
            far = far * math.sqrt(3)
            return (1 + far) * torch.exp(-far)
        far = far * math.sqrt(5)
        return (1 + far + far**2 / 3) * torch.exp(-far)

    def diagonal(self, x: Tensor) -> Tensor:
        """Return the covariance of each row with itself, ``[rows]``."""
        if self.shape == "dot-product":
            return x.square().sum(dim=1) + self.length_scale**2
        return torch.ones_like(x[:, 0])


class ConstantCovariance(nn.Module):
    """The same number for all pairs; zero is what white noise has between different rows.

    Args:
        value: The number.
        noise: Addend of a row's covariance with itself.
    """

    def __init__(self, value: float, *, noise: float = 0.0) -> None:
        super().__init__()
        self.noise = float(noise)
        self.value = nn.Parameter(torch.tensor(float(value), dtype=torch.float64), requires_grad=bool(value != 0))

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        """Return covariances ``[rows, anchors]``."""
        return self.value.expand(x.shape[0], anchors.shape[0])

    def diagonal(self, x: Tensor) -> Tensor:
        """Return the covariance of each row with itself, ``[rows]``."""
        return (self.value + self.noise).expand(x.shape[0])


class Combined(nn.Module):
    """The sum or product of two covariances."""

    def __init__(self, first: nn.Module, second: nn.Module, *, multiplies: bool) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.multiplies = multiplies

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        """Return covariances ``[rows, anchors]``."""
        first, second = self.first(x, anchors), self.second(x, anchors)
        result: Tensor = first * second if self.multiplies else first + second
        return result

    def diagonal(self, x: Tensor) -> Tensor:
        """Return the covariance of each row with itself, ``[rows]``."""
        first, second = self.first.diagonal(x), self.second.diagonal(x)  # type: ignore[operator]
        result: Tensor = first * second if self.multiplies else first + second
        return result


class Powered(nn.Module):
    """A covariance to a power."""

    def __init__(self, base: nn.Module, exponent: float) -> None:
        super().__init__()
        self.base = base
        self.exponent = float(exponent)

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        """Return covariances ``[rows, anchors]``."""
        result: Tensor = self.base(x, anchors) ** self.exponent
        return result

    def diagonal(self, x: Tensor) -> Tensor:
        """Return the covariance of each row with itself, ``[rows]``."""
        result: Tensor = self.base.diagonal(x) ** self.exponent  # type: ignore[operator]
        return result


class PosteriorMean(nn.Module):
    """The mean of a Gaussian process given its samples: Rasmussen and Williams, algorithm 2.1, line 4.

    Args:
        covariance: Rows and samples in, ``[rows, samples]`` out.
        samples: ``[samples, features]``.
        weights: ``[samples, outputs]``.
        mean: Mean of the targets, ``[outputs]``.
        scale: Scale of the targets, ``[outputs]``.
    """

    def __init__(
        self,
        covariance: nn.Module,
        samples: npt.ArrayLike,
        weights: npt.ArrayLike,
        *,
        mean: npt.ArrayLike,
        scale: npt.ArrayLike,
    ) -> None:
        super().__init__()
        self.covariance = covariance
        self.samples = parameter(samples)
        self.weights = parameter(weights)
        self.mean = nn.Parameter(torch.from_numpy(np.array(mean, np.float64).reshape(-1)))
        self.scale = nn.Parameter(torch.from_numpy(np.array(scale, np.float64).reshape(-1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return means ``[rows, outputs]``."""
        values: Tensor = self.covariance(x, self.samples) @ self.weights
        return values * self.scale + self.mean


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
        self.points = parameter(points)
        self.weights = parameter(weights)
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
