"""Affine maps, sums over pairs of factors in linear time, and heads that no other family has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task, parameter
from torch import Tensor, nn


class Affine(OperatorModule):
    """``x @ weight.T + bias``; weight ``[outputs, features]``, bias ``[outputs]``."""

    def __init__(self, weight: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        matrix = np.atleast_2d(np.asarray(weight, np.float64))
        self.weight = nn.Parameter(torch.from_numpy(matrix.copy()))
        self.bias = nn.Parameter(torch.from_numpy(np.broadcast_to(np.asarray(bias, np.float64), len(matrix)).copy()))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, outputs]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class MultilabelMargins(PredictorModule):
    """One margin per label, each of which is set where its margin is positive.

    Args:
        body: Tables in, margins ``[rows, labels]`` out.
    """

    task: Task = "multilabel"

    def __init__(self, body: nn.Module, *, answers: Sequence[str]) -> None:
        super().__init__(answers=answers)
        self.body = body

    def decision(self, scores: Tensor) -> Tensor:
        """Return margins, ``[rows, labels]``."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return 0 or 1 for each label, ``[rows, labels]`` int64."""
        return (scores > 0).long()


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
        self.factors = parameter(factors)

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
        """Return ``[rows, 1]`` from codes ``[rows, columns]``, integers in any dtype."""
        rows = codes.long()
        chosen = torch.stack([table[rows[:, index]] for index, table in enumerate(self.tables)])
        sums = chosen.sum(0)
        interactions = (sums[:, 1:].square() - chosen[:, :, 1:].square().sum(0)).sum(1, keepdim=True) / 2
        return self.intercept + sums[:, :1] + interactions
