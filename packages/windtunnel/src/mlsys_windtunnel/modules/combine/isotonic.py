"""Piecewise linear functions of one number: isotonic regression, and the calibration that is made of it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Outside = Literal["clip", "nan"]


def interp(x: Tensor, knots: Tensor, values: Tensor, *, outside: Outside = "clip") -> Tensor:
    """Interpolate linearly, as ``numpy.interp`` for ``clip`` and ``scipy.interpolate.interp1d`` for ``nan``.

    Args:
        x: Points at which the function is read, of any shape.
        knots: Strictly increasing, ``[k]``, at least one. A single knot is a constant function.
        values: The function at the knots, ``[k]``.
        outside: Answer beyond the first and last knot: their values, or NaN. NaN always gives NaN.

    Example:
        >>> knots, values = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([5.0, 6.0, 10.0])
        >>> interp(torch.tensor([-1.0, 0.5, 2.0, 3.0]), knots, values).tolist()
        [5.0, 5.5, 8.0, 10.0]
    """
    if len(knots) == 1:
        return values.expand(x.shape).clone()
    inside = x.clamp(knots[0], knots[-1])
    above = torch.searchsorted(knots, inside.contiguous()).clamp(1, len(knots) - 1)
    left, right = knots[above - 1], knots[above]
    low, high = values[above - 1], values[above]
    result = low + (high - low) / (right - left) * (inside - left)
    result = torch.where(inside == right, high, result)
    return result if outside == "clip" else torch.where(inside == x, result, torch.nan)


class Isotonic(nn.Module):
    """:func:`interp` of a table of one column, with trainable values.

    Args:
        knots: Strictly increasing, ``[k]``.
        values: ``[k]``.
        outside: See :func:`interp`.
        rounds: True rounds the input to float32 first, as a source that was fitted on float32 does.
    """

    knots: Tensor

    def __init__(
        self, knots: npt.ArrayLike, values: npt.ArrayLike, *, outside: Outside = "clip", rounds: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("knots", torch.from_numpy(np.array(knots, np.float64)))
        self.values = nn.Parameter(torch.from_numpy(np.array(values, np.float64)))
        self.outside: Outside = outside
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        """Interpolate ``x``, ``[rows, 1]``."""
        given = x.to(torch.float32).to(x.dtype) if self.rounds else x
        return interp(given, self.knots, self.values, outside=self.outside)
