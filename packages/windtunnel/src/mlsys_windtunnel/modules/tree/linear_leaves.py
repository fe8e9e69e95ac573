"""Trees whose leaves hold linear models (LightGBM's ``linear_tree``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn

ROWS_PER_BLOCK = 512  # rows that are answered at once: bounds the table [rows, trees, features of a leaf]


class LinearLeaves(OperatorModule):
    """Sums of the linear models of the leaves that a row reaches; a leaf's own value where a feature is missing.

    Args:
        trees: Of one value a leaf; its values answer rows that lack a feature of the leaf's model.
        constants: ``[leaves]``.
        features: Features of each leaf's model.
        coefficients: Coefficients of these.
    """

    features: Tensor
    is_used: Tensor
    group: Tensor  # [leaves]: the column of sums that a leaf adds to

    def __init__(
        self,
        trees: Trees,
        *,
        constants: npt.ArrayLike,
        features: Sequence[Sequence[int]],
        coefficients: Sequence[Sequence[float]],
    ) -> None:
        super().__init__()
        self.trees = trees
        self.num_groups = trees.num_groups
        most = max(1, *map(len, features))
        table, weight = np.zeros((len(features), most), np.int64), np.zeros((len(features), most))
        is_used = np.zeros((len(features), most), bool)
        for leaf, (read, factors) in enumerate(zip(features, coefficients, strict=True)):
            table[leaf, : len(read)], weight[leaf, : len(read)], is_used[leaf, : len(read)] = read, factors, True
        self.constant = nn.Parameter(torch.from_numpy(np.array(constants, np.float64)))
        self.coefficient = nn.Parameter(torch.from_numpy(weight))
        self.register_buffer("features", torch.from_numpy(table))
        self.register_buffer("is_used", torch.from_numpy(is_used))
        sizes = np.diff(trees.leaf_start.numpy())
        self.register_buffer("group", torch.from_numpy(np.repeat(np.arange(len(sizes)) % self.num_groups, sizes)))

    def forward(self, x: Tensor) -> Tensor:
        """Return sums ``[rows, groups]``."""
        if not isinstance(cast(nn.Module, self.trees), Trees):
            return self._soft(x)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self._exact(x)
        return torch.cat([self._exact(block) for block in torch.split(x, ROWS_PER_BLOCK)])

    def _exact(self, x: Tensor) -> Tensor:
        leaves = self.trees.leaves(x)
        features, is_used = self.features[leaves], self.is_used[leaves]
        read = x.gather(1, features.flatten(1)).reshape(features.shape)
        is_missing = (read.isnan() & is_used).any(dim=2)
        products = torch.where(is_used & ~is_missing.unsqueeze(2), read, 0) * self.coefficient[leaves]
        fallback = self.trees.leaf_value[:, 0][leaves]
        values = torch.where(is_missing, fallback, self.constant[leaves] + products.sum(dim=2))
        grouped = values.reshape(values.shape[0], -1, self.num_groups)
        return grouped.sum(dim=1) if torch.is_grad_enabled() else grouped.cumsum(dim=1)[:, -1]

    def _soft(self, x: Tensor) -> Tensor:
        """Compute sums of all leaves' models, weighted: what soft trees answer."""
        weights = self.trees.leaf_weights(x)
        read = x[:, self.features.flatten()].reshape(x.shape[0], *self.features.shape)
        read = torch.where(self.is_used & ~read.isnan(), read, 0)
        values = weights * (self.constant + (read * self.coefficient).sum(dim=2))
        return values.new_zeros(x.shape[0], self.num_groups).index_add(1, self.group, values)
