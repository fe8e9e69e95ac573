"""Embeddings: what categorical encoders become (dissertation, section 5.2.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from torch import Tensor, nn


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
        """Return ``[rows, sum of widths]`` from codes ``[rows, columns]``, whole numbers in any dtype."""
        rows = codes.long()
        return torch.cat([table[rows[:, index]] for index, table in enumerate(self.tables)], dim=1)


class BinEmbedding(OperatorModule):
    """Numbers to bins, and the bins to rows of a table per column.

    Args:
        inner_edges: Ascending, ``[bins of the column - 1]`` each; a value on an edge belongs to the bin above.
        tables: ``[bins of the column, width]`` each.
        rounds_to_float32: Whether the source rounds values before it compares them.
    """

    inner_edges: Tensor

    def __init__(
        self,
        inner_edges: Sequence[npt.NDArray[np.float64]],
        tables: Sequence[npt.ArrayLike],
        *,
        rounds_to_float32: bool = False,
    ) -> None:
        super().__init__()
        padded = np.full((len(inner_edges), max(map(len, inner_edges))), np.inf)
        for edges, row in zip(inner_edges, padded, strict=True):
            row[: len(edges)] = edges
        self.register_buffer("inner_edges", torch.from_numpy(padded))
        self.embedding = CategoryEmbedding(tables)
        self.rounds_to_float32 = rounds_to_float32

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, sum of widths]``."""
        if self.rounds_to_float32:
            x = x.float().to(self.inner_edges.dtype)
        bins = (x.unsqueeze(2) >= self.inner_edges).sum(2)
        result: Tensor = self.embedding(bins)
        return result
