"""Inputs of soft splits: standardised float32 columns, missing values apart, categories as learnt numbers."""

from __future__ import annotations

import numpy as np
import torch
from mlsys_windtunnel.backends.soft.plan import ColumnStatistics
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.native import ZERO
from torch import Tensor, nn

CATEGORY = 2.0  # how sure a split by categories is to begin with: tanh(2) = .96


class SoftColumns(nn.Module):
    """Map from the table that trees read, ``[rows, columns]``, to what their splits read.

    A split by categories has a column of its own after the others: a number for each category, below zero for
    those that go left.

    Args:
        ensemble: The trees.
        statistics: Statistics of the columns.
        trains_categories: True makes these numbers parameters.
    """

    mean: Tensor  # [columns] float64, as the next
    inverse_deviation: Tensor
    zero_is_missing: Tensor  # [columns] bool
    is_unknown_below_zero = False  # files of before have no such field

    def __init__(self, ensemble: TreeEnsemble, statistics: ColumnStatistics, *, trains_categories: bool) -> None:
        super().__init__()
        zero = np.zeros(ensemble.num_features, bool)
        zero[list(ensemble.zero_is_missing)] = True
        self.register_buffer("mean", torch.from_numpy(statistics.mean.copy()))
        self.register_buffer("inverse_deviation", torch.from_numpy(1 / statistics.deviation))
        self.register_buffer("zero_is_missing", torch.from_numpy(zero))
        self.has_zero_missing = bool(zero.any())
        self.is_unknown_below_zero = ensemble.rounds_to_float32  # XGBoost: a category that no set holds
        self.categorical = [int(feature) for feature in ensemble.categorical_features]
        self.tables = nn.ParameterList()  # of each categorical feature, [codes + 2, splits]: unknown codes, missing
        for feature in self.categorical:
            splits = np.flatnonzero((ensemble.feature == feature) & (ensemble.category_set >= 0))
            size = max(int(np.diff(ensemble.category_start[ensemble.category_set[split] :][:2])[0]) for split in splits)
            codes = np.append(np.arange(size + 1.0), np.nan)
            left = ensemble.goes_left(splits, codes).T
            table = torch.from_numpy(np.where(left, -CATEGORY, CATEGORY).astype(np.float32))
            self.tables.append(nn.Parameter(table, requires_grad=trains_categories))

    @staticmethod
    def column_of_split(ensemble: TreeEnsemble) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the column that each split reads, ``[splits]``."""
        column = ensemble.feature.copy()
        start = ensemble.num_features
        for feature in ensemble.categorical_features:
            splits = np.flatnonzero((ensemble.feature == feature) & (ensemble.category_set >= 0))
            column[splits] = start + np.arange(len(splits))
            start += len(splits)
        return column

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[columns, rows]`` float32, missing values as 0, and where they are (``None``: nowhere)."""
        if self.has_zero_missing:
            x = x.masked_fill((x.detach().abs() <= ZERO) & self.zero_is_missing, torch.nan)
        columns = ((x - self.mean) * self.inverse_deviation).float()
        missing = columns.detach().isnan()
        if self.tables:
            missing[:, self.categorical] = False
            codes = [
                self._codes(x[:, feature], table) for feature, table in zip(self.categorical, self.tables, strict=True)
            ]
            learnt = [table[code] for table, code in zip(self.tables, codes, strict=True)]
            columns = torch.cat([columns, *learnt], dim=1)
            missing = torch.cat([missing, missing.new_zeros(len(x), columns.shape[1] - missing.shape[1])], dim=1)
            columns = torch.nan_to_num(columns)  # a missing category has a number; its own column is read by none
        if not torch.compiler.is_compiling() and not missing.any():  # a program has no such branch
            return columns.t().contiguous(), None
        return columns.masked_fill(missing, 0.0).t().contiguous(), missing.t()

    def _codes(self, column: Tensor, table: Tensor) -> Tensor:
        """Return rows of a table, as the exact form reads categories: whole parts, those below 0 and NaN missing."""
        column, last = column.detach(), len(table) - 1
        code = column.trunc()
        if self.is_unknown_below_zero:
            code = code.masked_fill(column < 0, last - 1)
        return torch.where(code >= 0, code.clamp(max=last - 1), last).long()
