"""Log-densities of several Gaussians at once: discriminants, mixtures and Gaussian naive Bayes are made of them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


class DiagonalGaussians(nn.Module):
    """``bias_k + log N(x; mean_k, diag(scale_k)^-2)`` for each component ``k``.

    Args:
        means: ``[components, features]``.
        scales: Inverse standard deviations, ``[components, features]``, or ``[components, 1]`` for round ones.
        bias: ``[components]``: logarithms of weights or priors.
    """

    def __init__(self, means: npt.ArrayLike, scales: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        self.means = _parameter(means)
        self.log_scales = _parameter(np.log(np.asarray(scales, np.float64)))
        self.bias = _parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-densities ``[rows, components]``."""
        log_scales = self.log_scales.expand_as(self.means)
        scales = log_scales.exp()
        squares = [((x - mean) * scale).square().sum(dim=1) for mean, scale in zip(self.means, scales, strict=True)]
        return _log_density(squares, self.bias + log_scales.sum(dim=1), x.shape[1])


class FullGaussians(nn.Module):
    """``bias_k + log N(x; mean_k, (F_k F_k^T)^-1)`` with ``F_k = directions_k * exp(log_scales_k)``, column by column.

    The columns of ``directions_k`` are a matrix of determinant one in size (orthogonal, or unit triangular), so the
    density's volume is in the scales alone.

    Args:
        means: ``[components, features]``.
        directions: ``[components, features, rank]``, or ``[1, features, rank]`` where the components share it.
        log_scales: ``[components, rank]`` or ``[1, rank]``.
        bias: ``[components]``: logarithms of weights or priors.
    """

    def __init__(
        self, means: npt.ArrayLike, directions: npt.ArrayLike, log_scales: npt.ArrayLike, bias: npt.ArrayLike
    ) -> None:
        super().__init__()
        self.means = _parameter(means)
        self.directions = _parameter(directions)
        self.log_scales = _parameter(log_scales)
        self.bias = _parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-densities ``[rows, components]``."""
        factors = self.directions * self.log_scales.exp().unsqueeze(1)
        factors = factors.expand(len(self.means), -1, -1)
        squares = [((x - mean) @ factor).square().sum(dim=1) for mean, factor in zip(self.means, factors, strict=True)]
        return _log_density(squares, self.bias + self.log_scales.sum(dim=1), x.shape[1])


class Nearness(nn.Module):
    """Squared Mahalanobis distance from a mean, negated, above an offset.

    Args:
        mean: ``[features]``.
        precision: Inverse covariance, ``[features, features]``.
        offset: Taken off.
    """

    def __init__(self, mean: npt.ArrayLike, precision: npt.ArrayLike, offset: float) -> None:
        super().__init__()
        self.mean, self.precision = _parameter(mean), _parameter(precision)
        self.offset = _parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 1]``."""
        centred = x - self.mean
        squares = (centred * (centred @ self.precision)).sum(dim=1, keepdim=True)
        return -squares - self.offset


def _log_density(squares: list[Tensor], offset: Tensor, num_features: int) -> Tensor:
    """Return log-densities from squared whitened distances, one ``[rows]`` per component."""
    return offset - 0.5 * (num_features * math.log(2 * math.pi) + torch.stack(squares, dim=1))


def _parameter(values: npt.ArrayLike) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(values, np.float64)))
