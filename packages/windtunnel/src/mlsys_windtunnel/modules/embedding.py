"""Embeddings: what categorical encoders become (dissertation, section 5.2.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mlsys_windtunnel.modules.base import OperatorModule


class CategoryEmbedding(OperatorModule):
    """A table per column of codes; the rows that the codes select, side by side.

    Args:
        tables: ``[codes of the column, width]`` each; to begin with, the rows that the source's encoder gives.

    Example:
        >>> one_hot = CategoryEmbedding([np.eye(2), np.eye(3)])
        >>> one_hot(torch.tensor([[1.0, 2.0]])).tolist()
        [[0.0, 1.0, 0.0, 0.0, 1.0]]
    """

    def __init__(self, tables: Sequence[npt.ArrayLike]) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.from_numpy(np.array(table, np.float64)) for table in tables)

    def forward(self, codes: Tensor) -> Tensor:
        """``[rows, sum of widths]`` from codes ``[rows, columns]``, whole numbers in any dtype."""
        rows = codes.long()
        return torch.cat([table[rows[:, place]] for place, table in enumerate(self.tables)], dim=1)
