"""Monotone maps of each column on its own: affine scalers, cuts, power and quantile transformations, and inverses.

Missing values stay missing, and give the parameters no gradient: see :func:`keeping_nan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, parameter
from torch import Tensor, nn

PowerMethod = Literal["yeo-johnson", "box-cox"]
BOUND = 1e-7  # scikit-learn's BOUNDS_THRESHOLD: how near to 0 and 1 a normal quantile may come
SERIES_BELOW = 1e-4  # below, four terms of expm1(z) / z are exact to 1e-18 and, unlike the quotient, have a gradient


def keeping_nan(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)`` where ``x`` is a number, NaN where it is NaN.

    NaN never enters ``function``: its gradient would reach the parameters as 0 * NaN, which is NaN.
    """
    missing = torch.isnan(x)
    return torch.where(missing, x, function(torch.where(missing, 1.0, x)))


class Chain(OperatorModule):
    """Modules one after another."""

    def __init__(self, *steps: nn.Module) -> None:
        super().__init__()
        self.steps = nn.Sequential(*steps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last step."""
        result: Tensor = self.steps(x)
        return result


class ElementwiseAffine(OperatorModule):
    """``(x - shift) / scale`` column by column."""

    def __init__(self, shift: npt.ArrayLike, scale: npt.ArrayLike) -> None:
        super().__init__()
        self.shift = parameter(shift)
        self.scale = parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        """Subtract the shift from ``x`` and divide by the scale; NaN stays."""
        return keeping_nan(lambda number: (number - self.shift) / self.scale, x)


class Rescale(OperatorModule):
    """``x * scale + offset`` column by column: rounds as its source does, and inverts :class:`ElementwiseAffine`."""

    def __init__(self, scale: npt.ArrayLike, offset: npt.ArrayLike) -> None:
        super().__init__()
        self.scale = parameter(scale)
        self.offset = parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` by the scale and add the offset; NaN stays."""
        return keeping_nan(lambda number: number * self.scale + self.offset, x)


class Clip(OperatorModule):
    """Numbers cut to ``[low, high]``."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """Clip ``x`` to the range."""
        return x.clamp(self.low, self.high)


class Power(OperatorModule):
    """The Yeo-Johnson (Biometrika 2000) or Box-Cox (JRSS-B 1964) transformation, one exponent per column.

    Both are ``expm1(exponent * u) / exponent``, of ``u = log(x)`` for Box-Cox and of ``u = log1p(|x|)``, with the sign
    of ``x`` and with ``2 - exponent`` below zero, for Yeo-Johnson.
    """

    def __init__(self, method: PowerMethod, exponents: npt.ArrayLike) -> None:
        super().__init__()
        self.method = method
        self.exponents = parameter(exponents)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each number of ``x``; NaN stays."""
        return keeping_nan(self._transformed, x)

    def _transformed(self, x: Tensor) -> Tensor:
        if self.method == "box-cox":
            return _expm1_over(self.exponents, x.log())
        is_negative = x < 0
        size = torch.where(is_negative, -x, x)
        result = _expm1_over(torch.where(is_negative, 2 - self.exponents, self.exponents), size.log1p())
        return torch.where(is_negative, -result, result)


def _expm1_over(exponent: Tensor, u: Tensor) -> Tensor:
    """Return ``expm1(exponent * u) / exponent``, and its limit ``u`` at 0."""
    z = exponent * u
    is_small = z.abs() < SERIES_BELOW
    series = u * (1 + z / 2 * (1 + z / 3 * (1 + z / 4)))
    return torch.where(is_small, series, torch.expm1(z) / torch.where(is_small, 1.0, exponent))


class PowerInverse(Power):
    """Inverse of :class:`Power`, with the same exponents; NaN beyond what that can give."""

    def _transformed(self, x: Tensor) -> Tensor:
        if self.method == "box-cox":
            return _log1p_over(self.exponents, x).exp()
        is_negative = x < 0
        size = torch.where(is_negative, -x, x)
        result = _log1p_over(torch.where(is_negative, 2 - self.exponents, self.exponents), size).expm1()
        return torch.where(is_negative, -result, result)


def _log1p_over(exponent: Tensor, v: Tensor) -> Tensor:
    """Return ``log1p(exponent * v) / exponent``, and its limit ``v`` at 0; NaN without a gradient where undefined."""
    is_defined = exponent * v >= -1
    v = torch.where(is_defined, v, 0.0)
    z = exponent * v
    is_small = z.abs() < SERIES_BELOW
    series = v * (1 - z * (1 / 2 - z * (1 / 3 - z / 4)))
    result = torch.where(is_small, series, torch.log1p(z) / torch.where(is_small, 1.0, exponent))
    return torch.where(is_defined, result, float("nan"))


class PiecewiseLinear(OperatorModule):
    """Linear interpolation column by column; beyond the outer knots the outer heights.

    A number that equals several knots gets the mean of the first and the last one's heights, as scikit-learn's
    interpolation from both sides has it.

    Args:
        knots: ``[features, knots]``, each row ascending; structure, since their order must stay.
        heights: ``[features, knots]``; trainable.
    """

    knots: Tensor

    def __init__(self, knots: npt.ArrayLike, heights: npt.ArrayLike) -> None:
        super().__init__()
        self.register_buffer("knots", torch.from_numpy(np.array(knots, np.float64)))
        self.heights = parameter(heights)

    def forward(self, x: Tensor) -> Tensor:
        """Interpolate each number of ``x``; NaN stays."""
        return keeping_nan(self._interpolated, x)

    def _interpolated(self, x: Tensor) -> Tensor:
        last = self.knots.shape[1] - 1
        columns = x.T.contiguous()
        low = (torch.searchsorted(self.knots, columns, right=True) - 1).clamp(min=0)
        high = torch.searchsorted(self.knots, columns).clamp(max=last)
        left, right = self.knots.gather(1, low), self.knots.gather(1, high)
        below, above = self.heights.gather(1, low), self.heights.gather(1, high)
        is_between = high > low
        share = torch.where(is_between, (columns - left) / torch.where(is_between, right - left, 1.0), 0.5)
        return (below + share * (above - below)).T


class Quantile(OperatorModule):
    """Each column's empirical distribution function, and from there to a normal distribution if asked.

    Args:
        quantiles: ``[features, quantiles]``, each row ascending.
        references: ``[quantiles]``, from 0 to 1.
        is_normal: True makes the output normal; else it is uniform on [0, 1].
    """

    def __init__(self, quantiles: npt.NDArray[np.float64], references: npt.ArrayLike, *, is_normal: bool) -> None:
        super().__init__()
        self.distribution = PiecewiseLinear(quantiles, np.broadcast_to(np.asarray(references), quantiles.shape))
        self.is_normal = is_normal

    def forward(self, x: Tensor) -> Tensor:
        """Transform each number of ``x``; NaN stays."""
        return keeping_nan(self._transformed, x)

    def _transformed(self, x: Tensor) -> Tensor:
        knots, heights = self.distribution.knots, self.distribution.heights
        first, last = knots[:, 0], knots[:, -1]
        is_last, is_first = (x + BOUND > last, x - BOUND < first) if self.is_normal else (x == last, x == first)
        share = torch.where(is_first, heights[:, 0], torch.where(is_last, heights[:, -1], self.distribution(x)))
        if not self.is_normal:
            return share
        bound = BOUND - float(np.spacing(1))
        normal: Tensor = torch.special.ndtri(share.clamp(bound, 1 - bound))  # cut before: its slope at 0 is infinite
        return normal


class QuantileInverse(OperatorModule):
    """Inverse of :class:`Quantile`, with the same arguments."""

    def __init__(self, quantiles: npt.NDArray[np.float64], references: npt.ArrayLike, *, is_normal: bool) -> None:
        super().__init__()
        self.distribution = PiecewiseLinear(np.broadcast_to(np.asarray(references), quantiles.shape), quantiles)
        self.is_normal = is_normal

    def forward(self, x: Tensor) -> Tensor:
        """Restore each number of ``x``; NaN stays."""
        return keeping_nan(self._restored, x)

    def _restored(self, x: Tensor) -> Tensor:
        if self.is_normal:
            x = torch.special.ndtr(x)
            x = torch.where(x - BOUND < 0, 0.0, torch.where(x + BOUND > 1, 1.0, x))
        result: Tensor = self.distribution(x)
        return result
