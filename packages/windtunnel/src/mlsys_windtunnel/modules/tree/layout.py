"""Trees as the native kernel reads them: thresholds as places among the thresholds of their feature, nodes by siblings.

A value's *bin* is how many of its feature's thresholds (the *edges*) lie below it; of a category 0 is missing, code c
is 1 + c, and codes that no split knows are the bin after. Splits read *columns* of bins: a feature has one in which
missing values come after all edges, one in which they come before, or both, as its splits want them. Planning only:
``modules/native.py`` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.modules.tree.ensemble import Booleans, Floats, Integers, TreeEnsemble

LANES = 8  # as in models.cpp, and so are the records below
NODE = {
    is_wide: np.dtype([("bin", small), ("column", small), ("child", "u4")])
    for is_wide, small in ((False, "u2"), (True, "u4"))
}
FEATURE = np.dtype(
    [
        *((name, "i4") for name in ("place", "edge_start", "num_edges", "column")),
        *((name, "i4") for name in ("has_right", "has_left", "is_category", "zero_is_missing")),
    ]
)


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The kernel's arrays. A *place* is a node's; the children of a split stand side by side, the left one first."""

    nodes: npt.NDArray[np.void]  # [places] of NODE
    features: npt.NDArray[np.void]  # [features that splits read] of FEATURE
    num_columns: int
    edges: Floats  # [edges of all features]
    root: npt.NDArray[np.uint32]  # [trees, rounded up to LANES] places
    leaf: npt.NDArray[np.uint32]  # [places]: the leaf, 0 at splits
    set_start: npt.NDArray[np.int32]  # [places] of splits by categories: their bytes in `member`
    set_size: npt.NDArray[np.int32]  # [places]; 0: no such split
    member: npt.NDArray[np.uint8]  # by bin, whether it goes left

    @property
    def is_wide(self) -> bool:
        """True where bins and columns take 32 bits, not 16."""
        return self.nodes.dtype == NODE[True]


def lay_out(ensemble: TreeEnsemble) -> TreeLayout:
    """Lay out the arrays of an ensemble; leaf values stay where they are."""
    num_splits = len(ensemble.feature)
    is_category = ensemble.category_set >= 0
    places, feature = np.unique(ensemble.feature, return_inverse=True)
    features = np.zeros(len(places), FEATURE)
    features["place"] = places
    features["is_category"] = np.isin(places, ensemble.categorical_features)
    features["zero_is_missing"] = np.isin(places, ensemble.zero_is_missing)
    column, num_columns = _columns(features, feature, ensemble.missing_left & ~is_category)
    edges, bins = _edges(ensemble, features, feature, is_category)
    is_wide = max(LANES * num_columns, int(features["num_edges"].max(initial=0)) + 2) >= 2**16 - 2
    largest = np.iinfo(NODE[is_wide]["bin"]).max
    bins[is_category] = largest - 1
    order, place = _siblings_together(ensemble)
    split_at = place[:num_splits]
    nodes = np.zeros(len(order), NODE[is_wide])
    nodes["bin"] = largest
    nodes["child"] = np.arange(len(order))
    nodes["bin"][split_at] = bins
    nodes["column"][split_at] = column * LANES
    nodes["child"][split_at] = place[ensemble.nodes(ensemble.left)]
    leaf = np.zeros(len(order), np.uint32)
    leaf[place[num_splits:]] = np.arange(len(ensemble.leaf_value))
    root = place[ensemble.nodes(ensemble.root)]
    roots = np.append(root, np.repeat(root[-1:], -len(root) % LANES)).astype(np.uint32)
    start, size, member = ensemble.category_bins()
    set_start, set_size = np.zeros((2, len(place)), np.int32)
    set_start[split_at], set_size[split_at] = start, size
    return TreeLayout(nodes, features, num_columns, edges, roots, leaf, set_start, set_size, member.astype(np.uint8))


def _columns(features: npt.NDArray[np.void], feature: Integers, wants_left: Booleans) -> tuple[Integers, int]:
    """Return the column that each split reads, and their number; ``wants_left``: missing values are to go left."""
    features["has_left"][feature[wants_left]] = 1
    features["has_right"][feature[~wants_left]] = 1
    ends = np.cumsum(features["has_left"] + features["has_right"])
    features["column"] = ends - features["has_left"] - features["has_right"]
    column: Integers = np.where(wants_left, ends[feature] - 1, features["column"][feature]).astype(np.int64)
    return column, int(ends[-1]) if len(ends) else 0


def _edges(
    ensemble: TreeEnsemble, features: npt.NDArray[np.void], feature: Integers, is_category: Booleans
) -> tuple[Floats, Integers]:
    """Return all edges, feature by feature, and the bin of each split's threshold; tell ``features`` of theirs."""
    bins = np.zeros(len(feature), np.int64)
    numeric = np.flatnonzero(~is_category)
    order = numeric[np.lexsort((ensemble.threshold[numeric], feature[numeric]))]
    of, threshold = feature[order], ensemble.threshold[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (of[1:] != of[:-1]) | (threshold[1:] != threshold[:-1])
    start = np.searchsorted(of[is_new], np.arange(len(features) + 1))
    bins[order] = np.cumsum(is_new) - 1 - start[of]
    features["edge_start"] = start[:-1]
    features["num_edges"] = np.diff(start)
    size = np.diff(ensemble.category_start)[ensemble.category_set[is_category]]
    np.maximum.at(features["num_edges"], feature[is_category], size.astype(np.int32))
    return threshold[is_new], bins


def _siblings_together(ensemble: TreeEnsemble) -> tuple[Integers, Integers]:
    """Order nodes tree by tree and level by level, so that children stand side by side, the left one first.

    Returns:
        The node at each place, and the place of each node.
    """
    num_splits = len(ensemble.feature)
    level, tree = ensemble.nodes(ensemble.root), np.arange(ensemble.num_trees)
    nodes, trees = [level], [tree]
    while len(level):
        is_split = level < num_splits
        split, tree = level[is_split], np.repeat(tree[is_split], 2)
        level = ensemble.nodes(np.stack([ensemble.left[split], ensemble.right[split]], axis=1).ravel())
        nodes.append(level)
        trees.append(tree)
    order = np.concatenate(nodes)[np.argsort(np.concatenate(trees), kind="stable")]
    place = np.zeros(len(order), np.int64)
    place[order] = np.arange(len(order))
    return order, place
