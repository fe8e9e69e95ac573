"""Finding leaves by walking all trees at once, level by level: right for deep trees, and it exports to plain gathers.

Trees stand in order of depth and drop out of the walk when they have ended, so the cost is the sum of depths.
"""

from __future__ import annotations

import numpy as np
import torch
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from torch import Tensor, nn


class Walk(nn.Module):
    """Leaves by walking.

    A node is a split's index, or behind all splits a leaf's; a leaf leads to itself.

    Args:
        ensemble: Trees.
    """

    view_feature: Tensor
    view_missing_left: Tensor
    view: Tensor
    child: Tensor
    root: Tensor
    order: Tensor
    set_start: Tensor
    set_size: Tensor
    member: Tensor

    tree_dim = 0  # of what find() returns

    def __init__(self, ensemble: TreeEnsemble) -> None:
        super().__init__()
        self.num_splits = len(ensemble.feature)
        depths = ensemble.depths()
        order = np.argsort(-depths, kind="stable")
        self.trees_at_level = tuple(int((depths > level).sum()) for level in range(int(depths.max())))
        self.has_missing_left = bool(ensemble.missing_left.any())
        self.has_categories = bool((ensemble.category_set >= 0).any())

        # A view is a feature, with missing values put where a split wants them: -inf goes left, NaN goes right.
        key = ensemble.feature * 2 + ensemble.missing_left
        views, view = np.unique(key, return_inverse=True)
        leaves = self.num_splits + np.arange(len(ensemble.leaf_value))
        left, right = (np.concatenate([ensemble.nodes(child), leaves]) for child in (ensemble.left, ensemble.right))
        set_start, set_size, member = ensemble.category_bins()
        buffers = {
            "view_feature": views // 2,
            "view_missing_left": (views % 2 == 1)[:, None],
            "view": view,
            "child": np.stack([left, right], axis=1).ravel(),
            "root": ensemble.nodes(ensemble.root[order]),
            "order": np.argsort(order),
            "set_start": np.where(set_size > 0, set_start + 1, 0),
            "set_size": set_size,
            "member": np.append(False, member),  # the first is read, and not used, where a split is numeric
        }
        for name, array in buffers.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)), persistent=False)

    def columns(self, x: Tensor) -> Tensor:
        """Return the views' columns, ``[views, rows]``, from clean inputs ``[rows, features]``."""
        values = x.t().contiguous().index_select(0, self.view_feature)
        if self.has_missing_left:
            values = values.masked_fill(values.isnan() & self.view_missing_left, -torch.inf)
        return values

    def find(self, columns: Tensor, threshold: Tensor) -> Tensor:
        """Find the leaf of each row in each tree, ``[trees, rows]`` int64."""
        num_rows, values = columns.shape[1], columns.reshape(-1)
        row = torch.arange(num_rows, device=columns.device).repeat(len(self.root))
        node = self.root.repeat_interleave(num_rows)
        ended = []
        for num_trees in self.trees_at_level:
            ended.append(node[num_trees * num_rows :])
            node, row = node[: num_trees * num_rows], row[: num_trees * num_rows]
            split = node.clamp(max=self.num_splits - 1)
            value = values.index_select(0, self.view.index_select(0, split) * num_rows + row)
            goes_left = value <= threshold.index_select(0, split)
            if self.has_categories:
                is_category = (
                    self.set_size.index_select(0, split) > 0
                )  # logic, since ONNX Runtime has no "where" of bools
                goes_left = (is_category & self._holds(split, value)) | (~is_category & goes_left)
            node = self.child.index_select(0, 2 * node + ~goes_left)
        node = torch.cat([node, *reversed(ended)])
        return node.reshape(-1, num_rows).index_select(0, self.order) - self.num_splits

    def _holds(self, split: Tensor, code: Tensor) -> Tensor:
        """Return whether the split's set of categories sends the code left; its first entry is for missing values."""
        size = self.set_size.index_select(0, split)
        entry = code.nan_to_num(nan=-1.0).clamp(-1.0, 1e9).long() + 1
        entry = torch.minimum(entry, size - 1).clamp(min=0)
        return self.member.index_select(0, self.set_start.index_select(0, split) + entry)
