"""The tensor form of trees, whatever they were converted from: both layouts against a walk in plain Python."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.modules.tree.bits import mask_bits
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, join_trees, with_features
from mlsys_windtunnel.modules.tree.trees import Trees, cheapest_layout

NUM_FEATURES, CATEGORICAL = 4, 3  # the last feature holds categories
VALUES = [-np.inf, -2.0, -1e-35, 0.0, 1e-36, 0.5, 1.0, 1.0000001, 2.0, 7.0, np.inf, np.nan]
CODES = [-1.0, -0.5, 0.0, 0.7, 1.0, 2.0, 5.0, 64.0, 1e12, np.nan]


def _random_tree(rng: np.random.Generator, num_leaves: int, num_outputs: int) -> Tree:
    """Grown by splitting leaves at random."""
    left, right = np.zeros((2, num_leaves - 1), np.int64)
    slots: list[tuple[np.ndarray, int] | None] = [None]  # where each leaf hangs
    root = 0 if num_leaves > 1 else ~0
    for split in range(num_leaves - 1):
        leaf = int(rng.integers(len(slots)))
        if (slot := slots[leaf]) is not None:
            slot[0][slot[1]] = split
        left[split], right[split] = ~leaf, ~len(slots)
        slots[leaf] = (left, split)
        slots.append((right, split))
    feature = rng.integers(0, NUM_FEATURES, num_leaves - 1)
    return Tree(
        feature=feature,
        threshold=rng.choice([-2.0, 0.0, 0.5, 1.0, 2.0, np.inf], num_leaves - 1),
        left=left,
        right=right,
        missing_left=rng.random(num_leaves - 1) < 0.5,
        leaf_value=rng.normal(size=(num_leaves, num_outputs)),
        root=root,
        left_categories={
            int(split): np.unique(rng.integers(0, 70, rng.integers(0, 5)))
            for split in np.flatnonzero(feature == CATEGORICAL)
        },
    )


def _ensemble(seed: int, sizes: list[int], num_outputs: int = 1, **options) -> TreeEnsemble:
    rng = np.random.default_rng(seed)
    return join_trees([_random_tree(rng, size, num_outputs) for size in sizes], num_features=NUM_FEATURES, **options)


def _rows(seed: int, num_rows: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.column_stack([*rng.choice(VALUES, (3, num_rows)), rng.choice(CODES, num_rows)])


def _leaf(ensemble: TreeEnsemble, root: int, row: np.ndarray) -> int:
    node = root
    while node >= 0:
        value = row[ensemble.feature[node]]
        if ensemble.feature[node] in ensemble.zero_is_missing and abs(value) <= float(np.float32(1e-35)):
            value = np.nan
        if ensemble.category_set[node] >= 0:
            start, end = ensemble.category_start[ensemble.category_set[node] :][:2]
            beyond = float(2**24) if ensemble.rounds_to_float32 and value < 0 else value
            code = np.nan if beyond <= -1 else beyond
            goes_left = (
                bool(ensemble.missing_left[node])
                if np.isnan(code)
                else int(code) < end - start and bool(ensemble.category_left[start + int(code)])
            )
        else:
            if ensemble.rounds_to_float32:
                value = float(np.float32(value))
            goes_left = bool(ensemble.missing_left[node]) if np.isnan(value) else value <= ensemble.threshold[node]
        node = int(ensemble.left[node] if goes_left else ensemble.right[node])
    return ~node


def _leaves(ensemble: TreeEnsemble, x: np.ndarray) -> np.ndarray:
    return np.array([[_leaf(ensemble, int(root), row) for root in ensemble.root] for row in x])


@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    rounds=st.booleans(),
    zero_is_missing=st.sets(st.integers(0, CATEGORICAL - 1)),
)
@settings(max_examples=30)
def test_both_layouts_find_the_leaves_that_a_plain_walk_finds(seed, sizes, rounds, zero_is_missing):
    ensemble = _ensemble(seed, sizes, rounds_to_float32=rounds, zero_is_missing=sorted(zero_is_missing))
    x = _rows(seed, 40)
    expected = _leaves(ensemble, x)
    walk = Trees(ensemble, layout="walk")
    np.testing.assert_array_equal(walk.leaves(torch.from_numpy(x)), expected)
    if max(sizes) > 1:
        walk.use_layout("bits")
        np.testing.assert_array_equal(walk.leaves(torch.from_numpy(x)), expected)


@pytest.mark.parametrize(
    ("leaves", "bits"), [(2, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)]
)
def test_masks_are_as_short_as_the_largest_tree_allows(leaves, bits):
    ensemble = _ensemble(leaves, [leaves, 2])
    assert mask_bits(ensemble) == bits
    x = _rows(1, 60)
    np.testing.assert_array_equal(Trees(ensemble, layout="bits").leaves(torch.from_numpy(x)), _leaves(ensemble, x))


@pytest.mark.parametrize("layout", ["bits", "walk"])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.usefixtures("without_kernel")
def test_leaves_are_summed_in_turn_per_output(layout, with_gradients):
    ensemble = _ensemble(3, [5, 9, 4, 7, 6, 3])
    trees = Trees(ensemble, bias=[10.0, 20.0, 30.0], num_groups=3, divisor=2, layout=layout)
    x = _rows(3, 50)
    values = ensemble.leaf_value[_leaves(ensemble, x), 0]
    expected = (values.reshape(50, 2, 3).sum(1) + np.array([10, 20, 30])) / 2
    with torch.set_grad_enabled(with_gradients):
        np.testing.assert_allclose(trees(torch.from_numpy(x)).detach(), expected)


@pytest.mark.parametrize("layout", ["bits", "walk"])
def test_leaves_of_several_outputs_are_summed(layout):
    ensemble = _ensemble(4, [5, 9, 4], num_outputs=2)
    x = _rows(4, 50)
    expected = ensemble.leaf_value[_leaves(ensemble, x)]
    trees = Trees(ensemble, layout=layout)
    np.testing.assert_allclose(trees.tree_values(torch.from_numpy(x)).detach(), expected)
    np.testing.assert_allclose(trees(torch.from_numpy(x)).detach(), expected.sum(1))


@pytest.mark.parametrize("layout", ["bits", "walk"])
@pytest.mark.usefixtures("without_kernel")
def test_blocks_of_rows_on_threads_answer_as_one_block(layout, monkeypatch):
    monkeypatch.setattr("mlsys_windtunnel.modules.tree.trees._ROW_TREES_PER_BLOCK", 1)
    trees = Trees(_ensemble(5, [30, 20]), layout=layout)
    x = torch.from_numpy(_rows(5, 333))
    with torch.inference_mode():
        blocks = trees(x)
    torch.testing.assert_close(blocks, trees(x).detach())


@pytest.mark.parametrize("layout", ["bits", "walk"])
def test_gradients_reach_the_leaves_that_rows_fall_into_and_no_other(layout):
    ensemble = _ensemble(6, [12, 8])
    trees = Trees(ensemble, layout=layout)
    x = _rows(6, 3)
    trees(torch.from_numpy(x)).sum().backward()
    counts = np.bincount(_leaves(ensemble, x).ravel(), minlength=20)
    np.testing.assert_array_equal(trees.leaf_value.grad[:, 0], counts)
    assert trees.threshold.grad is None


@pytest.mark.parametrize("layout", ["bits", "walk"])
def test_the_exported_program_answers_the_same_for_any_number_of_rows(layout):
    trees = Trees(_ensemble(7, [20, 40, 3]), layout=layout)
    rows = torch.export.Dim("rows", min=1, max=1000)
    program = torch.export.export(trees, (torch.from_numpy(_rows(7, 8)),), dynamic_shapes=({0: rows},))
    for count in (1, 77):
        x = torch.from_numpy(_rows(count, count))
        torch.testing.assert_close(program.module()(x), trees(x))


@pytest.mark.parametrize("layout", ["bits", "walk"])
def test_loaded_thresholds_are_what_is_compared(layout):
    source, target = _ensemble(8, [9, 9]), None
    moved = Trees(source, layout=layout)
    with torch.no_grad():
        moved.threshold += 1.5
        moved.leaf_value += 1
    target = Trees(source, layout=layout)
    target.load_state_dict(moved.state_dict())
    x = _rows(8, 60)
    np.testing.assert_array_equal(target.leaves(torch.from_numpy(x)), _leaves(moved.ensemble, x))
    assert (_leaves(moved.ensemble, x) != _leaves(source, x)).any()
    np.testing.assert_allclose(target.ensemble.leaf_value, source.leaf_value + 1)


def test_thresholds_of_a_float32_source_survive_float32():
    """They are rounded down, so a float32 module compares as its source does, ties and neighbours included."""
    thresholds = np.random.default_rng(0).normal(size=50)
    trees = [
        Tree(
            np.zeros(1, int), np.array([t]), np.array([~0]), np.array([~1]), np.zeros(1, bool), np.array([[0.0], [1.0]])
        )
        for t in thresholds
    ]
    module = Trees(join_trees(trees, num_features=1, rounds_to_float32=True))
    nearest = thresholds.astype(np.float32)
    x = np.concatenate([nearest, np.nextafter(nearest, np.float32(9)), np.nextafter(nearest, np.float32(-9))])[:, None]
    expected = (x.astype(np.float64) > thresholds).sum(1)
    assert (module(torch.from_numpy(x).double())[:, 0].detach().numpy() == expected).all()
    assert (module.float()(torch.from_numpy(x))[:, 0].detach().numpy() == expected).all()


def test_a_module_is_copied_and_pickled():
    trees = Trees(_ensemble(9, [9, 20]))
    x = torch.from_numpy(_rows(9, 20))
    for other in (copy.deepcopy(trees), pickle.loads(pickle.dumps(trees))):
        torch.testing.assert_close(other(x), trees(x))
        other.load_state_dict(trees.state_dict())


def test_small_trees_get_bits_and_deep_ones_walk():
    assert cheapest_layout(_ensemble(0, [31] * 50)) == "bits"
    assert cheapest_layout(_ensemble(0, [600] * 3)) == "walk"
    assert cheapest_layout(_ensemble(0, [1, 1])) == "walk", "nothing to look up"


def test_a_subset_of_features_is_put_in_its_place():
    tree = with_features(_random_tree(np.random.default_rng(0), 5, 1), [7, 3, 5, 1])
    assert set(tree.feature) <= {7, 3, 5, 1}


def test_an_invalid_ensemble_is_refused():
    with pytest.raises(InvalidInputError, match="no trees"):
        join_trees([], num_features=1)
    with pytest.raises(InvalidInputError, match="take turns"):
        Trees(_ensemble(0, [2, 2, 2]), num_groups=2)
    one = np.zeros(2, np.int64)
    mixed = Tree(one, np.zeros(2), np.array([1, ~0]), ~np.array([1, 2]), one > 0, np.zeros((3, 1)), 0, {1: one[:1]})
    with pytest.raises(InvalidInputError, match="both as categories and as numbers"):
        join_trees([mixed], num_features=1)
