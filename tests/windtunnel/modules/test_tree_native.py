"""The C++ kernel against the walk in torch: the same bits, whatever the trees and rows."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_windtunnel.modules.native import NativeTrees, kernel
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, join_trees
from mlsys_windtunnel.modules.tree.layout import lay_out
from mlsys_windtunnel.modules.tree.trees import Trees

pytestmark = pytest.mark.usefixtures("kernel_level")

NUM_FEATURES = 4


def random_tree(rng: np.random.Generator, num_splits: int, *, outputs: int, categories: bool) -> Tree:
    """Grown split by split at a random leaf; few distinct thresholds, so that ties happen."""
    left, right = np.zeros((2, num_splits), np.int64)
    open_ends: list[tuple[np.ndarray, int]] = []
    root = ~0 if num_splits == 0 else 0
    for split in range(num_splits):
        if split:
            side, parent = open_ends.pop(rng.integers(len(open_ends)))
            side[parent] = split
        open_ends += [(left, split), (right, split)]
    for leaf, (side, parent) in enumerate(open_ends):
        side[parent] = ~leaf
    feature = rng.integers(NUM_FEATURES - 1, size=num_splits)
    sets = {}
    for split in range(num_splits if categories else 0):
        if rng.random() < 0.5:
            feature[split] = NUM_FEATURES - 1  # the one column that holds codes
            sets[split] = np.flatnonzero(rng.random(5) < 0.5)
    return Tree(
        feature=feature,
        threshold=rng.integers(-2, 3, size=num_splits).astype(float),
        left=left,
        right=right,
        missing_left=(rng.random(num_splits) < 0.5) & ~np.isin(np.arange(num_splits), list(sets)),
        leaf_value=rng.normal(size=(num_splits + 1, outputs)),
        root=root,
        left_categories=sets,
    )


def make_rows(rng: np.random.Generator, count: int) -> torch.Tensor:
    x = rng.integers(-3, 4, size=(count, NUM_FEATURES)).astype(float)
    x[:, -1] = rng.integers(0, 8, size=count)
    x[rng.random(x.shape) < 0.15] = np.nan
    x[rng.random(x.shape) < 0.02] = np.inf
    x[rng.random(x.shape) < 0.05] = -1e-36  # which may count as zero
    x[rng.random(x.shape) < 0.05] -= 1e-9  # which rounding takes back
    return torch.from_numpy(x)


def native(ensemble: TreeEnsemble, x: torch.Tensor, **options: object) -> torch.Tensor:
    library = kernel()
    assert library is not None, "the tests need a C++ compiler"
    return torch.from_numpy(NativeTrees(library, ensemble, **options)(x.numpy()))


def in_torch(ensemble: TreeEnsemble, x: torch.Tensor, **options: object) -> torch.Tensor:
    trees = Trees(ensemble, layout="walk", **options)
    with torch.no_grad():
        return trees._sums(trees.finder.columns(trees._clean(x))) / trees.divisor


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    splits=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    count=st.sampled_from([1, 3, 31, 32, 33, 64, 65, 200]),
    outputs=st.integers(1, 3),
    categories=st.booleans(),
    groups=st.booleans(),
    has_bias=st.booleans(),
    rounds=st.booleans(),
    zeros=st.sampled_from([(), (0, 2), (NUM_FEATURES - 1,)]),
)
def test_the_kernel_gives_the_same_bits_as_torch(
    seed, splits, count, outputs, categories, groups, has_bias, rounds, zeros
):
    rng = np.random.default_rng(seed)
    num_groups = 1
    if groups:
        outputs, num_groups = 1, len(splits)
    trees = [random_tree(rng, n, outputs=outputs, categories=categories) for n in splits]
    ensemble = join_trees(trees, num_features=NUM_FEATURES, rounds_to_float32=rounds, zero_is_missing=zeros)
    bias = rng.normal(size=num_groups if num_groups > 1 else outputs) if has_bias else None
    options = {"bias": bias, "num_groups": num_groups, "divisor": 3.0}
    x = make_rows(rng, count)
    got = native(ensemble, x, **options)
    assert torch.equal(got, in_torch(ensemble, x, **options))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("count", [9, 16])
def test_columns_and_thresholds_beyond_16_bits(count):
    rng = np.random.default_rng(0)
    num_splits = 70_000
    tree = random_tree(rng, num_splits, outputs=1, categories=False)
    many_thresholds = replace(tree, feature=np.zeros_like(tree.feature), threshold=rng.normal(size=num_splits))
    many_features = replace(tree, feature=rng.permutation(num_splits), threshold=rng.normal(size=num_splits))
    for ensemble in (
        join_trees([many_thresholds], num_features=1),
        join_trees([many_features], num_features=num_splits),
    ):
        x = torch.from_numpy(rng.normal(size=(count, ensemble.num_features)))
        assert lay_out(ensemble).is_wide
        assert torch.equal(native(ensemble, x), in_torch(ensemble, x))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_share_the_rows(num_threads):
    rng = np.random.default_rng(0)
    ensemble = join_trees(
        [random_tree(rng, 20, outputs=1, categories=False) for _ in range(9)], num_features=NUM_FEATURES
    )
    x = make_rows(rng, 24_000)  # times nine trees: three threads are worth starting (kWalksWorthAThread)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        got = native(ensemble, x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, in_torch(ensemble, x))


def test_rows_that_are_not_contiguous_are_taken():
    rng = np.random.default_rng(0)
    ensemble = join_trees([random_tree(rng, 5, outputs=1, categories=False)], num_features=NUM_FEATURES)
    x = make_rows(rng, 50)
    expected = native(ensemble, x)
    assert torch.equal(native(ensemble, x.t().contiguous().t()), expected)
    x.numpy().flags.writeable = False
    assert torch.equal(native(ensemble, x), expected)
    assert native(ensemble, x[:0]).shape == (0, 1)


@pytest.mark.parametrize("count", [1, 7, 8, 300])
@pytest.mark.parametrize("slope", [2.0, 2e3])  # with the latter the exponential overflows
def test_probabilities_are_the_logistic_function_of_sums(slope, count):
    rng = np.random.default_rng(0)
    ensemble = join_trees([random_tree(rng, 9, outputs=1, categories=False)] * 3, num_features=NUM_FEATURES)
    x = make_rows(rng, count)
    expected = torch.sigmoid(slope * native(ensemble, x, bias=np.array([-1.0])))
    got = NativeTrees(kernel(), ensemble, bias=np.array([-1.0]))(x.numpy(), slope=slope)
    np.testing.assert_allclose(got, torch.cat([1 - expected, expected], dim=1), rtol=0, atol=1e-15)


def test_a_module_answers_by_the_kernel_and_notices_training():
    rng = np.random.default_rng(0)
    ensemble = join_trees(
        [random_tree(rng, 9, outputs=1, categories=False) for _ in range(5)], num_features=NUM_FEATURES
    )
    trees, x = Trees(ensemble, bias=[0.5]), make_rows(rng, 40)
    with torch.no_grad():
        before = trees(x)
        assert torch.equal(before, in_torch(ensemble, x, bias=[0.5]))
    assert trees(x).requires_grad, "with gradients the form in torch answers"
    torch.testing.assert_close(trees(x).detach(), before)
    optimizer = torch.optim.SGD(trees.parameters(), lr=1.0)
    trees(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        after = trees(x)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, trees(x).detach())
    again = pickle.loads(pickle.dumps(trees))
    with torch.inference_mode():
        assert torch.equal(again(x), after)
