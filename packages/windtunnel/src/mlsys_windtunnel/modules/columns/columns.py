"""Moving columns about: selection, concatenation, scaling by a constant."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_windtunnel.modules.base import OperatorModule
from torch import Tensor, nn


class Select(OperatorModule):
    """Some columns of a table, in a given order."""

    columns: Tensor

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(list(columns), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, len(columns)]``."""
        return x.index_select(1, self.columns)


class Concatenate(OperatorModule):
    """Tables side by side."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``[rows, sum of widths]``."""
        return torch.cat(inputs, dim=1)


class Scale(OperatorModule):
    """Multiplication by one constant (scikit-learn's ``transformer_weights``)."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` times the constant."""
        return x * self.weight
