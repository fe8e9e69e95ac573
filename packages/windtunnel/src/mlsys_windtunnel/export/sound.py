"""Structure that native code relies on, looked at when a module is loaded: what points outside its table is refused.

torch and numpy check each index; the kernels of trees, soft trees and linear maps do not. ``tree_safety.py`` looks at
the trees of scikit-learn's own estimators in the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.backends.soft.trees import SoftGroupParameters, SoftTrees
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.host.lookup import UNKNOWN, CategoryLookup, HashLookup, Vocabulary
from mlsys_windtunnel.host.words import Words
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.trees import Trees


def check_sound(module: WindTunnelModule) -> None:
    """Look at trees, soft trees, and embeddings with the look-ups that they read.

    Raises:
        InvalidInputError: something points outside its table.
    """
    for part in module.modules():
        if isinstance(part, Trees):
            _check_trees(part)
        elif isinstance(part, SoftTrees):
            _check_soft_trees(part)
    for each in module.frontend.host_data:
        _check(not isinstance(each, Words) or each.is_sound, "words")
    lookups = {value.name: value.lookup for value in module.frontend.frontier}
    for lookup in lookups.values():
        if isinstance(lookup, CategoryLookup):
            _check(len(lookup.names) == len(lookup.vocabularies), "categories")
            for vocabulary in lookup.vocabularies:
                _check_vocabulary(vocabulary)
    frontier = module.network.frontier
    is_made_of_pairs = isinstance(frontier, tuple) and all(isinstance(pair, tuple | list) for pair in frontier)
    _check(is_made_of_pairs and [*map(len, frontier)] == [2] * len(frontier), "tables")
    rules, width = module.frontend.rules, module.frontend.width or 0
    for columns in (rules.number_columns, rules.passed_columns, rules.category_columns or ()):
        is_of_numbers = isinstance(columns, tuple) and all(type(column) is int for column in columns)
        _check(is_of_numbers and all(0 <= column < width for column in columns), "columns")
    for wire, operator in zip(module.network.wires, module.network.operators, strict=True):
        for _, contract in wire.checks:
            _check_contract(contract)
        if isinstance(operator, CategoryEmbedding):
            _check_embedding(operator, lookups.get(wire.inputs[0]) if len(wire.inputs) == 1 else None)


def _check_contract(contract: Contract) -> None:
    flags = (contract.takes_nan, contract.takes_inf, contract.rounds_to_float32)
    _check(isinstance(contract.estimator, str) and all(isinstance(flag, bool) for flag in flags), "checks")
    bounds = (contract.low, contract.high)
    _check(all(bound is None or (type(bound) in (int, float) and bound == bound) for bound in bounds), "checks")


def _check_trees(trees: Trees) -> None:
    ensemble = trees.ensemble
    splits, leaves = len(ensemble.feature), len(ensemble.leaf_value)
    each = (ensemble.threshold, ensemble.left, ensemble.right, ensemble.missing_left, ensemble.category_set)
    _check(all(array.shape == (splits,) for array in each), "trees")
    _check(ensemble.leaf_value.ndim == 2 and ensemble.num_trees > 0 and ensemble.feature.ndim == 1, "trees")
    _check(_is_within(ensemble.feature, 0, ensemble.num_features), "trees")
    children = np.concatenate([ensemble.left, ensemble.right, ensemble.root])
    _check(_is_within(children, -leaves, splits), "trees")
    inner = children[children >= 0]
    _check(len(np.unique(inner)) == len(inner), "trees")  # each has one parent, so that no walk turns in circles
    starts = ensemble.leaf_start
    _check(len(starts) == ensemble.num_trees + 1 and _is_ascending(starts, leaves), "trees")
    _check_categories(ensemble)
    groups = int(trees.num_groups)
    _check(groups >= 1 and ensemble.num_trees % groups == 0, "trees")
    _check(groups == 1 or ensemble.num_outputs == 1, "trees")
    width = groups if groups > 1 else ensemble.num_outputs
    _check(trees.bias is None or trees.bias.shape == (width,), "trees")


def _check_categories(ensemble: TreeEnsemble) -> None:
    starts = ensemble.category_start
    _check(_is_within(ensemble.category_set, -1, max(len(starts) - 1, 0)), "trees")
    _check(_is_ascending(starts, len(ensemble.category_left)), "trees")


def _check_soft_trees(trees: SoftTrees) -> None:
    num_slots = 0
    for group in trees.groups:
        assert isinstance(group, SoftGroupParameters)
        leaf, left = group.leaf, group.left
        _check(leaf.ndim == 3 and left.ndim == 2, "soft trees")
        num_trees, num_leaves, _ = leaf.shape
        num_splits = left.shape[1]
        num_slots += num_trees * num_splits
        _check(left.shape == group.right.shape == (num_trees, num_splits), "soft trees")
        _check(group.count.shape == (num_trees, num_leaves), "soft trees")
        _check(group.path.shape == (num_trees, num_leaves, num_splits), "soft trees")
        _check(group.num_splits.shape == (num_trees,), "soft trees")
        _check(_is_within(group.num_splits.numpy(), 0, num_splits + 1), "soft trees")
        for children in (left.numpy(), group.right.numpy()):
            _check(_is_within(children, -num_leaves, num_splits), "soft trees")
        _check(left.dtype == group.right.dtype == group.num_splits.dtype, "soft trees")
    own = (trees.feature, trees.scale, trees.threshold, trees.missing)
    _check(all(tensor.shape == (num_slots,) for tensor in own), "soft trees")
    num_columns = len(trees.columns.mean) + len(trees.columns.tables)
    _check(_is_within(trees.feature.numpy(), 0, num_columns + 1), "soft trees")


def _check_vocabulary(vocabulary: Vocabulary) -> None:
    codes = np.array([*vocabulary._code_of.values(), vocabulary._code_of_missing], np.int64)
    _check(_is_within(codes, UNKNOWN, vocabulary.size), "categories")
    if vocabulary._numbers is not None:
        _check(vocabulary._numbers.shape == vocabulary._codes_of_numbers.shape, "categories")
        _check(_is_within(vocabulary._codes_of_numbers, 0, vocabulary.size), "categories")


def _check_embedding(embedding: CategoryEmbedding, lookup: Any) -> None:
    """Check that each code of the look-up is a row of the table; an unknown one is the last, or in a bucket."""
    _check(isinstance(lookup, CategoryLookup) and len(lookup.vocabularies) == len(embedding.tables), "categories")
    more = lookup.num_buckets if isinstance(lookup, HashLookup) else 1
    for vocabulary, table in zip(lookup.vocabularies, embedding.tables, strict=True):
        _check(table.ndim == 2 and more >= 1 and 0 <= vocabulary.size <= len(table) - more, "categories")


def _is_within(values: npt.NDArray[Any], low: int, end: int) -> bool:
    return values.dtype.kind in "iu" and bool(((values >= low) & (values < end)).all())


def _is_ascending(starts: npt.NDArray[Any], end: int) -> bool:
    """Return whether the values are starts of ranges and the end of the last, all within a table of ``end``."""
    is_range = len(starts) > 0 and starts[0] == 0 and starts[-1] == end
    return bool(is_range) and starts.dtype.kind in "iu" and bool((np.diff(starts) >= 0).all())


def _check(is_sound: Any, what: str) -> None:
    if not is_sound:
        raise InvalidInputError(f"its {what} point outside their tables: it is damaged or forged")
