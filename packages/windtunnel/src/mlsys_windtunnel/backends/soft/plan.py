"""Layout of soft trees: trees of like size side by side, splits before the splits below them. Pure numpy.

A leaf's *literals* are the splits above it: -1 where its path goes left, +1 where it goes right, 0 elsewhere. With
split outputs of +-1 the sum over the literals of a leaf is their number where the row reaches that leaf, and at least
two less elsewhere (section 5.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.modules.tree.ensemble import Floats, Integers, TreeEnsemble

NONE = -1  # where a tree is smaller than its group: no split, no leaf
STEP = 8  # sizes are multiples of it, which fill vectors


@dataclass(frozen=True, slots=True)
class SoftGroup:
    """Trees of like size, padded to one size; ``T`` trees, ``S`` splits, ``L`` leaves."""

    trees: Integers  # [T]: indices in the ensemble, ascending
    output: int | None  # the column of scores that the trees add to; None: leaves have a value for each
    splits: Integers  # [T, S]: indices in the ensemble, NONE beyond a tree's own; parents stand before children
    leaves: Integers  # [T, L]: likewise
    left: Integers  # [T, S]: child of a split within the tree: a split, or ~leaf
    right: Integers  # [T, S]

    def literals(self) -> npt.NDArray[np.float32]:
        """Return the literals ``[T, L, S]``: -1, 0 or +1."""
        table = np.zeros((*self.leaves.shape, self.splits.shape[1]), np.float32)
        for tree in range(len(self.trees)):
            paths: dict[int, list[tuple[int, float]]] = {0: []}
            for index in np.flatnonzero(self.splits[tree] != NONE).tolist():
                above = paths.pop(index)
                for child, side in ((self.left, -1.0), (self.right, 1.0)):
                    paths[int(child[tree, index])] = [*above, (index, side)]
            for leaf, path in paths.items():
                for split, side in path:
                    table[tree, ~leaf, split] = side
        return table


def group_trees(ensemble: TreeEnsemble, *, num_groups: int = 1) -> list[SoftGroup]:
    """Group the ensemble's trees by padded size and, with ``num_groups`` > 1, by the output that a tree adds to."""
    tree_of_split = ensemble.tree_of_split()
    depth = np.zeros(len(ensemble.feature), np.int64)
    for level, splits in enumerate(ensemble.levels()):
        depth[splits] = level
    order = np.lexsort((np.arange(len(depth)), depth, tree_of_split))
    num_splits = np.bincount(tree_of_split, minlength=ensemble.num_trees)
    starts = np.cumsum([0, *num_splits])
    own = [order[starts[tree] : starts[tree + 1]] for tree in range(ensemble.num_trees)]
    sizes = np.array([padded_size(int(size)) for size in np.diff(ensemble.leaf_start)])
    outputs = np.arange(ensemble.num_trees) % num_groups
    groups = []
    for size, output in sorted(set(zip(sizes.tolist(), outputs.tolist(), strict=True))):
        trees = np.flatnonzero((sizes == size) & (outputs == output))
        groups.append(_group(ensemble, trees, own, size, output if num_groups > 1 else None))
    return groups


def padded_size(num_leaves: int) -> int:
    """Return the leaves of the group for a tree of ``num_leaves``: at most a quarter more, or up to :data:`STEP`."""
    step = max(STEP, 1 << max(0, num_leaves.bit_length() - 3))
    return -(-num_leaves // step) * step


def _group(
    ensemble: TreeEnsemble, trees: Integers, own: Sequence[Integers], size: int, output: int | None
) -> SoftGroup:
    splits = np.full((len(trees), size), NONE)
    leaves = np.full((len(trees), size), NONE)
    left, right = np.zeros_like(splits), np.zeros_like(splits)
    for row, tree in enumerate(trees):
        indices = own[tree]
        start, end = ensemble.leaf_start[tree : tree + 2]
        splits[row, : len(indices)] = indices
        leaves[row, : end - start] = np.arange(start, end)
        index_of = {int(split): index for index, split in enumerate(indices)}
        for children, table in ((ensemble.left, left), (ensemble.right, right)):
            table[row, : len(indices)] = [
                index_of[int(child)] if child >= 0 else ~(int(~child) - int(start)) for child in children[indices]
            ]
    return SoftGroup(trees, output, splits, leaves, left, right)


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Statistics of the columns that trees read, from a sample of training rows; ``d`` columns."""

    mean: Floats  # [d]; 0 for a column without values
    deviation: Floats  # [d]; 1 where a column does not vary
    values: tuple[Floats, ...]  # of each column, the distinct values, ascending; no missing ones

    @classmethod
    def of(cls, x: npt.NDArray[np.float64]) -> ColumnStatistics:
        """Compute the statistics of rows ``[n, d]``; missing values (NaN) do not count."""
        values = tuple(np.unique(column[np.isfinite(column)]) for column in x.T)
        finite = np.where(np.isfinite(x), x, np.nan)
        filled = np.where(np.isnan(finite).all(axis=0), 0.0, finite)
        mean, deviation = np.nanmean(filled, axis=0), np.nanstd(filled, axis=0)
        return cls(mean, np.where(deviation > 0, deviation, 1.0), values)


def recentred(ensemble: TreeEnsemble, statistics: ColumnStatistics) -> tuple[Floats, Floats]:
    """Return thresholds in the middle between neighbouring training values, and half their distance; ``[splits]``.

    No row of the sample changes sides. LightGBM writes 1e-35 for the threshold between 0 and 1. A threshold outside of
    all values stays, with distance 0.
    """
    threshold, margin = ensemble.threshold.copy(), np.zeros(len(ensemble.threshold))
    for feature in np.unique(ensemble.feature):
        splits = np.flatnonzero((ensemble.feature == feature) & (ensemble.category_set < 0))
        values = statistics.values[feature]
        index = np.searchsorted(values, ensemble.threshold[splits], side="right")
        is_between = (index > 0) & (index < len(values))
        splits, index = splits[is_between], index[is_between]
        threshold[splits] = (values[index - 1] + values[index]) / 2
        margin[splits] = (values[index] - values[index - 1]) / 2
    return threshold, margin
