"""Numeric preprocessing without a fitted scale: functions, thresholds, norms of rows, products of columns, splines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, combinations_with_replacement
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "asinh": torch.asinh,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "identity": torch.positive,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logit": torch.logit,
    "sigmoid": torch.sigmoid,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tanh": torch.tanh,
}
Norm = Literal["l1", "l2", "max"]
Extrapolation = Literal["constant", "linear", "continue", "periodic"]


class Elementwise(OperatorModule):
    """A function of each number, named as in :data:`FUNCTIONS`."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each number of ``x``."""
        return FUNCTIONS[self.function](x)


class Binarize(OperatorModule):
    """1 above the threshold, else 0."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return 1 where ``x`` is above the threshold, else 0; in the shape and dtype of ``x``."""
        return (x > self.threshold).to(x.dtype)


class NormalizeRows(OperatorModule):
    """Rows divided by their norm; a row whose norm is zero, or nearly so, stays as it is."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Divide each row of ``x`` by its norm; rows of almost zero stay."""
        order = {"l1": 1.0, "l2": 2.0, "max": float("inf")}[self.norm]
        size = torch.linalg.vector_norm(x, ord=order, dim=1, keepdim=True)
        return x / torch.where(size < 10 * torch.finfo(x.dtype).eps, 1.0, size)


class Products(OperatorModule):
    """Products of columns: monomials of the degrees asked for, in scikit-learn's order.

    A monomial of degree d is one of degree d - 1 times one column, so each costs one multiplication.

    Args:
        width: Columns of the input.
        min_degree: The least degree given out; 0 and 1 both start at the columns themselves.
        max_degree: The highest degree.
        interaction_only: No column twice in a product.
        include_bias: A column of ones comes first.
    """

    def __init__(
        self, width: int, *, min_degree: int, max_degree: int, interaction_only: bool, include_bias: bool
    ) -> None:
        super().__init__()
        self.min_degree, self.max_degree = min_degree, max_degree
        self.include_bias = include_bias
        choose = combinations if interaction_only else combinations_with_replacement
        lower: dict[tuple[int, ...], int] = {(column,): column for column in range(width)}
        for degree in range(2, max_degree + 1):
            monomials = list(choose(range(width), degree))
            self._register(f"factors_{degree}", [lower[monomial[1:]] for monomial in monomials])
            self._register(f"columns_{degree}", [monomial[0] for monomial in monomials])
            lower = {monomial: index for index, monomial in enumerate(monomials)}

    def _register(self, name: str, indices: Sequence[int]) -> None:
        self.register_buffer(name, torch.tensor(indices, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, products]``."""
        parts = [torch.ones_like(x[:, :1])] if self.include_bias else []
        monomials = x
        for degree in range(1, self.max_degree + 1):
            if degree > 1:
                factors = monomials.index_select(1, self.get_buffer(f"factors_{degree}"))
                monomials = factors * x.index_select(1, self.get_buffer(f"columns_{degree}"))
            if degree >= self.min_degree:
                parts.append(monomials)
        return torch.cat(parts, dim=1)


class BSplines(OperatorModule):
    """The B-spline basis of each column, by the recursion of Cox and de Boor (J. Approx. Theory 6, 1972).

    Args:
        knots: ``[features, knots]``, each row strictly ascending, ``degree`` of them beyond the data on both sides.
        degree: Degree of the polynomials.
        extrapolation: Basis beyond the inner knots; "linear" takes a degree of 1 or more.
        include_bias: Keep each column's last spline, which the others determine.
        is_zero_for_nan: NaN gives zeros; otherwise NaN.
    """

    knots: Tensor

    def __init__(
        self,
        knots: npt.ArrayLike,
        *,
        degree: int,
        extrapolation: Extrapolation,
        include_bias: bool,
        is_zero_for_nan: bool,
    ) -> None:
        super().__init__()
        self.register_buffer("knots", torch.from_numpy(np.array(knots, np.float64)))
        self.degree = degree
        self.extrapolation = extrapolation
        self.include_bias = include_bias
        self.is_zero_for_nan = is_zero_for_nan

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, features * splines]``."""
        missing = torch.isnan(x)
        first, last = self.knots[:, self.degree], self.knots[:, -self.degree - 1]
        numbers = torch.where(missing, first, x)
        if self.extrapolation == "periodic":
            splines = self._basis(first + torch.remainder(numbers - first, last - first))
            kept = splines.shape[2] - self.degree
            wrapped = splines[:, :, : self.degree] + splines[:, :, kept:]
            splines = torch.cat([wrapped, splines[:, :, self.degree : kept]], dim=2)
        elif self.extrapolation == "continue":
            splines = self._basis(numbers)
        else:
            inside = torch.minimum(torch.maximum(numbers, first), last)
            splines = self._basis(inside)
            if self.extrapolation == "linear":
                splines = splines + (numbers - inside).unsqueeze(2) * self._slopes(inside)
        if not self.include_bias:
            splines = splines[:, :, :-1]
        absent = 0.0 if self.is_zero_for_nan else float("nan")
        return torch.where(missing.unsqueeze(2), absent, splines).flatten(1)

    def _basis(self, x: Tensor, *, degree: int | None = None) -> Tensor:
        """Return ``[rows, features, knots - degree - 1]``; beyond the inner knots the outermost polynomials go on."""
        knots, point = self.knots, x.unsqueeze(2)
        num_inner = knots.shape[1] - 2 * self.degree - 1
        starts = point >= knots[:, self.degree + 1 : self.degree + num_inner]
        always = torch.ones_like(point, dtype=torch.bool)
        within = torch.cat([always, starts], dim=2) & ~torch.cat([starts, ~always], dim=2)
        outer = torch.zeros_like(point).expand(-1, -1, self.degree)
        basis = torch.cat([outer, within.to(x.dtype), outer], dim=2)
        for order in range(1, (self.degree if degree is None else degree) + 1):
            rising = (point - knots[:, : -order - 1]) / (knots[:, order:-1] - knots[:, : -order - 1])
            falling = (knots[:, order + 1 :] - point) / (knots[:, order + 1 :] - knots[:, 1:-order])
            basis = rising * basis[:, :, :-1] + falling * basis[:, :, 1:]
        return basis

    def _slopes(self, x: Tensor) -> Tensor:
        """Compute derivatives of the basis at ``x``, from the basis of one degree less."""
        lower = self._basis(x, degree=self.degree - 1) * self.degree
        knots, degree = self.knots, self.degree
        rising = lower[:, :, :-1] / (knots[:, degree:-1] - knots[:, : -degree - 1])
        falling = lower[:, :, 1:] / (knots[:, degree + 1 :] - knots[:, 1:-degree])
        return rising - falling
