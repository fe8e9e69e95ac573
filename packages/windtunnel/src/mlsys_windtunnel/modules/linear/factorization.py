"""Factorisation machines and matrix factorisation: sums over pairs of factors, in linear time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.linear.linear import Affine
from torch import Tensor, nn


class FactorizationMachine(OperatorModule):
    """An affine map and, per output, factored interactions of all pairs of features (Rendle, ICDM 2010).

    Args:
        weight: ``[outputs, features]``.
        bias: ``[outputs]``.
        factors: ``[outputs, features, n_factors]``.
    """

    def __init__(self, weight: npt.ArrayLike, bias: npt.ArrayLike, factors: npt.ArrayLike) -> None:
        super().__init__()
        self.affine = Affine(weight, bias)
        self.factors = nn.Parameter(torch.from_numpy(np.array(factors, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, outputs]`` from ``[rows, features]``."""
        sums = torch.matmul(x, self.factors)  # [outputs, rows, n_factors]
        squares = torch.matmul(x.square(), self.factors.square())
        interactions = (sums.square() - squares).sum(2).T / 2
        result: Tensor = self.affine(x) + interactions
        return result


class IdFactorization(OperatorModule):
    """A mean, the biases of ids, and the inner products of their factors, pair by pair.

    Args:
        intercept: The mean.
        tables: Per column of ids ``[codes, 1 + n_factors]``: biases in the first column, then factors.
    """

    def __init__(self, intercept: float, tables: Sequence[npt.ArrayLike]) -> None:
        super().__init__()
        self.intercept = nn.Parameter(torch.tensor(intercept, dtype=torch.float64))
        self.tables = nn.ParameterList(torch.from_numpy(np.array(table, np.float64)) for table in tables)

    def forward(self, codes: Tensor) -> Tensor:
        """Return ``[rows, 1]`` from codes ``[rows, columns]``, whole numbers in any dtype."""
        rows = codes.long()
        chosen = torch.stack([table[rows[:, index]] for index, table in enumerate(self.tables)])
        sums = chosen.sum(0)
        interactions = (sums[:, 1:].square() - chosen[:, :, 1:].square().sum(0)).sum(1, keepdim=True) / 2
        return self.intercept + sums[:, :1] + interactions
