"""Trees as flat arrays: the one structure that every tree converter fills and that the tensor forms are built from.

A *split* sends a value left where ``value <= threshold``, or where its category is in the split's set; missing values
(NaN) go left where ``missing_left`` says so. Sources that compare otherwise are brought to this form by their
converters (``x < t`` is ``x <= the next smaller float``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree. A child is a split's index if 0 or more, else ``~leaf``: the complement of a leaf's index."""

    feature: Integers  # [splits]
    threshold: Floats  # [splits]; unused where the split is categorical
    left: Integers  # [splits]
    right: Integers  # [splits]
    missing_left: Booleans  # [splits]
    leaf_value: Floats  # [leaves, outputs]
    root: int = 0  # ~0 for a tree of one leaf
    left_categories: dict[int, Integers] = field(default_factory=dict)  # of categorical splits: codes that go left

    @classmethod
    def of_nodes(
        cls,
        *,
        is_leaf: npt.ArrayLike,
        feature: npt.ArrayLike,
        threshold: npt.ArrayLike,
        left: npt.ArrayLike,
        right: npt.ArrayLike,
        missing_left: npt.ArrayLike,
        value: npt.ArrayLike,
        left_categories: dict[int, Integers] | None = None,
    ) -> Tree:
        """Make a tree from one list of nodes, splits and leaves mixed, the root first; ``[nodes]`` each.

        ``value`` is ``[nodes]`` or ``[nodes, outputs]`` and read at leaves only; the keys of ``left_categories`` are
        nodes.
        """
        leaf = np.asarray(is_leaf, bool)
        index = np.where(leaf, ~(np.cumsum(leaf) - 1), np.cumsum(~leaf) - 1).astype(np.int64)
        values = np.asarray(value, np.float64)
        return cls(
            feature=np.asarray(feature, np.int64)[~leaf],
            threshold=np.asarray(threshold, np.float64)[~leaf],
            left=index[np.asarray(left, np.int64)[~leaf]],
            right=index[np.asarray(right, np.int64)[~leaf]],
            missing_left=np.asarray(missing_left, bool)[~leaf],
            leaf_value=(values[:, None] if values.ndim == 1 else values)[leaf],
            root=int(index[0]),
            left_categories={int(index[node]): codes for node, codes in (left_categories or {}).items()},
        )


@dataclass(frozen=True, slots=True)
class TreeEnsemble:
    """Trees side by side; indices of splits and leaves count through all trees, children as in :class:`Tree`."""

    feature: Integers  # [splits]
    threshold: Floats  # [splits]
    left: Integers  # [splits]
    right: Integers  # [splits]
    missing_left: Booleans  # [splits]
    leaf_value: Floats  # [leaves, outputs]
    root: Integers  # [trees]
    leaf_start: Integers  # [trees + 1]; the leaves of tree t are leaf_start[t]:leaf_start[t + 1]
    category_set: Integers  # [splits]; which set of categories, -1 where the split is numeric
    category_start: Integers  # [sets + 1]; set s holds the codes 0 .. category_start[s + 1] - category_start[s] - 1
    category_left: Booleans  # [category_start[-1]]; whether the code goes left; codes that a set does not hold: right
    num_features: int
    rounds_to_float32: bool = False  # the source compares inputs as float32
    zero_is_missing: tuple[int, ...] = ()  # features in which zero (LightGBM: |x| <= 1e-35) counts as missing

    @property
    def num_trees(self) -> int:
        """Number of trees."""
        return len(self.root)

    @property
    def num_outputs(self) -> int:
        """Number of values of a leaf."""
        return int(self.leaf_value.shape[1])

    @property
    def categorical_features(self) -> Integers:
        """The features that categorical splits read, ascending."""
        return np.unique(self.feature[self.category_set >= 0])

    def levels(self) -> list[Integers]:
        """Return splits by their distance from the root; each list ascends."""
        levels = []
        nodes = self.root[self.root >= 0]
        while len(nodes):
            levels.append(np.sort(nodes))
            nodes = np.concatenate([self.left[nodes], self.right[nodes]])
            nodes = nodes[nodes >= 0]
        return levels

    def tree_of_split(self) -> Integers:
        """Return the tree of each split, ``[splits]``."""
        tree = np.zeros(len(self.feature), np.int64)
        tree[self.root[self.root >= 0]] = np.flatnonzero(self.root >= 0)
        for level in self.levels():
            for child in (self.left, self.right):
                splits = child[level]
                tree[splits[splits >= 0]] = tree[level[splits >= 0]]
        return tree

    def depths(self) -> Integers:
        """Return the splits on the longest way from the root to a leaf, ``[trees]``."""
        tree = self.tree_of_split()
        depths = np.zeros(self.num_trees, np.int64)
        for depth, level in enumerate(self.levels(), 1):
            depths[tree[level]] = depth
        return depths

    def nodes(self, child: Integers) -> Integers:
        """Return indices of nodes for those of children: splits keep theirs, leaves stand behind all splits."""
        found: Integers = np.where(child >= 0, child, len(self.feature) + ~child)
        return found

    def category_bins(self) -> tuple[Integers, Integers, Booleans]:
        """Return where each split's set begins and its size, ``[splits]`` (0: numeric), and what goes left, set by set.

        A set's entries are what is missing, its codes, and the codes beyond them.
        """
        start, size = np.zeros((2, len(self.feature)), np.int64)
        members = [np.zeros(0, bool)]
        for split in np.flatnonzero(self.category_set >= 0):
            first, last = self.category_start[self.category_set[split] :][:2]
            start[split], size[split] = sum(map(len, members)), last - first + 2
            members.append(np.array([self.missing_left[split], *self.category_left[first:last], False]))
        return start, size, np.concatenate(members)

    def with_numbers(self, threshold: Floats, leaf_value: Floats) -> TreeEnsemble:
        """Return the same structure with other thresholds and leaf values."""
        return replace(self, threshold=threshold, leaf_value=leaf_value)

    def goes_left(self, splits: Integers, values: Floats) -> Booleans:
        """Return whether splits send values left, ``[splits, values]``; values may be codes, or NaN if missing."""
        missing = np.isnan(values)
        left: Booleans = values[None, :] <= self.threshold[splits, None]
        for row in np.flatnonzero(self.category_set[splits] >= 0):
            start, end = self.category_start[self.category_set[splits[row]] :][:2]
            codes = np.where(missing, end - start, np.clip(values, 0, end - start)).astype(np.int64)
            left[row] = np.append(self.category_left[start:end], False)[codes]
        return np.where(missing[None, :], self.missing_left[splits, None], left)


def join_trees(
    trees: Sequence[Tree],
    *,
    num_features: int,
    rounds_to_float32: bool = False,
    zero_is_missing: Sequence[int] = (),
) -> TreeEnsemble:
    """Put trees side by side.

    With ``rounds_to_float32`` thresholds are rounded down to float32, which changes no comparison with a float32.

    Raises:
        InvalidInputError: there is no tree, or a feature is read both as a category and as a number.
    """
    if not trees:
        raise InvalidInputError("the ensemble has no trees; fit it with at least one")
    splits = np.cumsum([0, *(len(tree.feature) for tree in trees)])
    leaves = np.cumsum([0, *(len(tree.leaf_value) for tree in trees)])

    def moved(child: npt.ArrayLike, tree: int) -> Integers:
        index = np.asarray(child, np.int64)
        indices: Integers = np.where(index >= 0, index + splits[tree], index - leaves[tree])
        return indices

    sets = [
        (splits[number] + split, codes)
        for number, tree in enumerate(trees)
        for split, codes in tree.left_categories.items()
    ]
    category_set = np.full(splits[-1], -1, np.int64)
    category_set[[split for split, _ in sets]] = np.arange(len(sets))
    held = [np.isin(np.arange(codes.max(initial=-1) + 1), codes) for _, codes in sets]
    threshold = np.concatenate([tree.threshold for tree in trees])
    ensemble = TreeEnsemble(
        feature=np.concatenate([tree.feature for tree in trees]),
        threshold=_float32_below(threshold) if rounds_to_float32 else threshold,
        left=np.concatenate([moved(tree.left, number) for number, tree in enumerate(trees)]),
        right=np.concatenate([moved(tree.right, number) for number, tree in enumerate(trees)]),
        missing_left=np.concatenate([tree.missing_left for tree in trees]),
        leaf_value=np.concatenate([tree.leaf_value for tree in trees]),
        root=np.array([int(moved(tree.root, number)) for number, tree in enumerate(trees)], np.int64),
        leaf_start=leaves.astype(np.int64),
        category_set=category_set,
        category_start=np.cumsum([0, *map(len, held)]).astype(np.int64),
        category_left=np.concatenate([np.zeros(0, bool), *held]),
        num_features=num_features,
        rounds_to_float32=rounds_to_float32,
        zero_is_missing=tuple(zero_is_missing),
    )
    both = np.intersect1d(ensemble.categorical_features, ensemble.feature[category_set < 0])
    if len(both):
        raise InvalidInputError(f"the features {both.tolist()} are split both as categories and as numbers")
    return ensemble


def stacked(ensembles: Sequence[TreeEnsemble]) -> TreeEnsemble:
    """Put the trees of ensembles over the same features side by side."""
    first = ensembles[0]
    splits = np.cumsum([0, *(len(each.feature) for each in ensembles)])
    leaves = np.cumsum([0, *(len(each.leaf_value) for each in ensembles)])
    sets = np.cumsum([0, *(len(each.category_start) - 1 for each in ensembles)])
    codes = np.cumsum([0, *(len(each.category_left) for each in ensembles)])

    def moved(name: str) -> Integers:
        parts = [getattr(each, name) for each in ensembles]
        return np.concatenate(
            [
                np.where(part >= 0, part + split, part - leaf)
                for part, split, leaf in zip(parts, splits, leaves, strict=False)
            ]
        )

    def started(name: str, offsets: Integers) -> Integers:
        starts = [getattr(each, name)[:-1] + offset for each, offset in zip(ensembles, offsets, strict=False)]
        return np.concatenate([*starts, offsets[-1:]])

    category_set = [
        np.where(each.category_set >= 0, each.category_set + offset, -1)
        for each, offset in zip(ensembles, sets, strict=False)
    ]
    return replace(
        first,
        feature=np.concatenate([each.feature for each in ensembles]),
        threshold=np.concatenate([each.threshold for each in ensembles]),
        left=moved("left"),
        right=moved("right"),
        missing_left=np.concatenate([each.missing_left for each in ensembles]),
        leaf_value=np.concatenate([each.leaf_value for each in ensembles]),
        root=moved("root"),
        leaf_start=started("leaf_start", leaves),
        category_set=np.concatenate(category_set),
        category_start=started("category_start", codes),
        category_left=np.concatenate([each.category_left for each in ensembles]),
    )


def with_features(tree: Tree, features: npt.ArrayLike) -> Tree:
    """Return the tree over a wider table; it was fitted on the columns ``features`` (bagging's feature subsets)."""
    return replace(tree, feature=np.asarray(features, np.int64)[tree.feature])


def bitset_codes(words: npt.ArrayLike) -> Integers:
    """Return the indices of set bits in a bitset of 32 bits a word, the lowest first."""
    return np.flatnonzero(np.asarray(words, np.int64)[:, None] >> np.arange(32) & 1)


def _float32_below(values: Floats) -> Floats:
    """Return the largest float32 that is no larger, as float64."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
        lower = np.nextafter(nearest, np.float32(-np.inf))
    below: Floats = np.where(nearest > values, lower, nearest).astype(np.float64)
    return below
