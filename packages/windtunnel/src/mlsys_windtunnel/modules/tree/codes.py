"""Categories that are numbers, to codes, within the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor


class CategoryCodes(OperatorModule):
    """Codes of some columns, then other columns as they are.

    Args:
        categories: Categories of each coded column, ascending and finite; the code is the index, NaN for any other.
        columns: The coded columns.
        others: The other columns.
    """

    categories: Tensor
    columns: Tensor
    others: Tensor

    def __init__(
        self, categories: Sequence[npt.NDArray[np.float64]], *, columns: npt.ArrayLike, others: npt.ArrayLike
    ) -> None:
        super().__init__()
        padded = np.full((len(categories), max(map(len, categories)) + 1), np.inf)
        for row, values in enumerate(categories):
            padded[row, : len(values)] = values
        self.register_buffer("categories", torch.from_numpy(padded))
        self.register_buffer("columns", torch.from_numpy(np.array(columns, np.int64)))
        self.register_buffer("others", torch.from_numpy(np.array(others, np.int64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, coded + others]``."""
        values = x.detach().index_select(1, self.columns).t().contiguous()
        index = torch.searchsorted(self.categories, values).clamp(max=self.categories.shape[1] - 1)
        is_known = (self.categories.gather(1, index) == values) & values.isfinite()
        codes = index.to(x.dtype).masked_fill(~is_known, torch.nan)
        return torch.cat([codes.t(), x.index_select(1, self.others)], dim=1)


class Coded(OperatorModule):
    """Trees over codes and numbers."""

    def __init__(self, codes: CategoryCodes, trees: Trees) -> None:
        super().__init__()
        self.codes = codes
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        """Return the trees' sums ``[rows, outputs]``."""
        sums: Tensor = self.trees(self.codes(x))
        return sums
