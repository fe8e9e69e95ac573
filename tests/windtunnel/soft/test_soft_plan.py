"""Plans of soft trees against the exact trees: literals tell leaves, recentring changes no side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_windtunnel.backends.soft.plan import NONE, ColumnStatistics, group_trees, padded_size, recentred
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, join_trees

NUM_FEATURES = 3


def grown_tree(rng: np.random.Generator, num_leaves: int) -> Tree:
    """A random tree; children may stand before their parents, as in some sources."""
    left, right = np.zeros(num_leaves - 1, int), np.zeros(num_leaves - 1, int)
    order = rng.permutation(num_leaves - 1)
    open_slots: list[tuple[int, int]] = []
    for number, split in enumerate(order):
        if number:
            parent, side = open_slots.pop(rng.integers(len(open_slots)))
            (left if side == 0 else right)[parent] = split
        open_slots += [(int(split), 0), (int(split), 1)]
    for leaf, (parent, side) in enumerate(open_slots):
        (left if side == 0 else right)[parent] = ~leaf
    return Tree(
        feature=rng.integers(NUM_FEATURES, size=num_leaves - 1),
        threshold=rng.normal(size=num_leaves - 1).round(1),
        left=left,
        right=right,
        missing_left=rng.random(num_leaves - 1) < 0.5,
        leaf_value=rng.normal(size=(num_leaves, 1)),
        root=int(order[0]) if num_leaves > 1 else ~0,
    )


def grown_ensemble(seed: int, sizes: list[int]) -> TreeEnsemble:
    rng = np.random.default_rng(seed)
    return join_trees([grown_tree(rng, size) for size in sizes], num_features=NUM_FEATURES)


@given(seed=st.integers(0, 999), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=30)
def test_literals_reach_one_leaf_and_it_is_the_exact_one(seed: int, sizes: list[int]) -> None:
    ensemble = grown_ensemble(seed, sizes)
    rows = np.random.default_rng(seed + 1).normal(size=(20, NUM_FEATURES))
    expected = exact_leaves(ensemble, rows)
    seen = []
    for group in group_trees(ensemble):
        path = group.literals()
        count = np.abs(path).sum(axis=2)
        for index, tree in enumerate(group.trees):
            seen.append(tree)
            own = group.splits[index] != NONE
            splits = group.splits[index][own]
            outputs = np.zeros((len(own), len(rows)))
            outputs[own] = np.where(ensemble.threshold[splits, None] < rows[:, ensemble.feature[splits]].T, 1, -1)
            reached = (path[index] @ outputs == count[index][:, None]) & (group.leaves[index] != NONE)[:, None]
            assert (reached.sum(axis=0) == 1).all()
            assert (group.leaves[index][reached.argmax(axis=0)] == expected[:, tree]).all()
    assert sorted(seen) == list(range(ensemble.num_trees))


def exact_leaves(ensemble: TreeEnsemble, rows: np.ndarray) -> np.ndarray:
    leaves = np.zeros((len(rows), ensemble.num_trees), int)
    for row, values in enumerate(rows):
        for tree, root in enumerate(ensemble.root):
            node = root
            while node >= 0:
                is_left = values[ensemble.feature[node]] <= ensemble.threshold[node]
                node = (ensemble.left if is_left else ensemble.right)[node]
            leaves[row, tree] = ~node
    return leaves


@given(seed=st.integers(0, 999), num_values=st.integers(1, 30))
@settings(max_examples=30)
def test_recentred_thresholds_send_all_sampled_values_to_the_same_side(seed: int, num_values: int) -> None:
    ensemble = grown_ensemble(seed, [30])
    rows = np.random.default_rng(seed).normal(size=(num_values, NUM_FEATURES)).round(1)
    threshold, margin = recentred(ensemble, ColumnStatistics.of(rows))
    for split, feature in enumerate(ensemble.feature):
        values = rows[:, feature]
        assert ((values <= threshold[split]) == (values <= ensemble.threshold[split])).all()
        assert (np.abs(values - threshold[split]) >= margin[split] - 1e-12).all()


def test_lightgbms_tiny_threshold_moves_to_the_middle_of_zero_and_one() -> None:
    tree = Tree(
        feature=np.array([0]),
        threshold=np.array([1e-35]),
        left=np.array([~0]),
        right=np.array([~1]),
        missing_left=np.array([True]),
        leaf_value=np.array([[0.0], [1.0]]),
    )
    threshold, margin = recentred(
        join_trees([tree], num_features=1), ColumnStatistics.of(np.array([[0.0], [1.0], [np.nan]]))
    )
    assert threshold.tolist() == [0.5]
    assert margin.tolist() == [0.5]


@pytest.mark.parametrize("num_leaves", [1, 7, 8, 9, 31, 63, 64, 65, 1000])
def test_padding_is_small(num_leaves: int) -> None:
    size = padded_size(num_leaves)
    assert size % 8 == 0
    assert num_leaves <= size <= max(num_leaves + 7, num_leaves * 1.25)


def test_statistics_pass_over_missing_and_constant_columns() -> None:
    statistics = ColumnStatistics.of(np.array([[1.0, 5.0, np.nan], [3.0, 5.0, np.nan], [np.nan, 5.0, np.nan]]))
    assert statistics.mean.tolist() == [2.0, 5.0, 0.0]
    assert statistics.deviation.tolist() == [1.0, 1.0, 1.0]
    assert [values.tolist() for values in statistics.values] == [[1.0, 3.0], [5.0], []]
