"""Columns as they go on: selection, concatenation, scaling by a constant, imputing, embeddings.

Embeddings are what categorical encoders become (dissertation, section 5.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, parameter
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


class Unstored(OperatorModule):
    """NaN in place of each 0: what a sparse table does not store is missing to its reader."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with NaN for 0."""
        return x.masked_fill(x == 0, torch.nan)


class Scale(OperatorModule):
    """Multiplication by one constant (scikit-learn's ``transformer_weights``)."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` times the constant."""
        return x * self.weight


class Impute(OperatorModule):
    """Trainable values where a cell is missing, and then, if asked for, columns that say where it was.

    Args:
        fill: ``[kept columns]``, what missing cells become.
        kept: Indices of the columns that go on; the source drops those that were empty when it was fitted.
        marker: Content of a missing cell; NaN or a number.
        indicated: Indices of the columns whose missingness is an output, as 1.0 and 0.0.
    """

    kept: Tensor
    indicated: Tensor
    marker: Tensor

    def __init__(
        self, fill: npt.ArrayLike, kept: Sequence[int], *, marker: float = np.nan, indicated: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.fill = parameter(fill)
        self.register_buffer("kept", torch.tensor(list(kept), dtype=torch.int64))
        self.register_buffer("indicated", torch.tensor(list(indicated), dtype=torch.int64))
        self.register_buffer("marker", torch.tensor(marker, dtype=torch.float64))
        self.is_marked_by_nan = bool(np.isnan(marker))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, kept columns + indicated columns]``."""
        is_missing = x.isnan() if self.is_marked_by_nan else x == self.marker
        filled = torch.where(is_missing.index_select(1, self.kept), self.fill, x.index_select(1, self.kept))
        return torch.cat([filled, is_missing.index_select(1, self.indicated).to(x.dtype)], dim=1)


class Given(OperatorModule):
    """Output of the host's look-up, as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


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
        """Return ``[rows, sum of widths]`` from codes ``[rows, columns]``, integers in any dtype."""
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
