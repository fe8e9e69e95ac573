"""Checks that scikit-learn's trees, as a file from a stranger holds them, stay within their tables.

scikit-learn walks trees in native code that trusts each index. A forged child or feature would make it read memory that
is not the tree's, so skops leaves trees to the reader's judgement; here it is: every index is looked at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

TREE = "sklearn.tree._tree.Tree"
HISTOGRAM_TREE = "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)
_BITSET_WORDS = 8  # of 32 bits: histogram boosting knows the categories 0 to 255


def check_trees(estimator: object) -> None:
    """Look at all trees within an estimator, and at what their estimators hand them.

    Raises:
        InvalidInputError: a node's child or feature is not there, or an estimator and its trees differ in columns.
    """
    for part in _reachable(estimator):
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        if kind == TREE:
            _check_tree(part)
        elif kind == HISTOGRAM_TREE:
            _check_histogram_tree(part)
        elif hasattr(part, "get_params") and hasattr(part, "__dict__"):
            _check_holder(part)


def _reachable(root: object) -> Iterator[Any]:
    """Yield each object within ``root`` once."""
    pending: list[Any] = [root]
    seen: dict[int, Any] = {}
    while pending:
        part = pending.pop()
        if id(part) in seen or isinstance(part, _OPAQUE):
            continue
        seen[id(part)] = part  # held, so that no other object takes its identity
        yield part
        is_array_of_objects = isinstance(part, np.ndarray) and part.dtype == object
        pending += part.ravel().tolist() if is_array_of_objects else gc.get_referents(part)


def _check_tree(tree: Any) -> None:
    is_split = tree.children_left != -1
    _check_nodes(is_split, tree.children_left, tree.children_right, tree.feature, tree.n_features)


def _check_histogram_tree(tree: Any) -> None:
    nodes = tree.nodes
    is_split = ~nodes["is_leaf"].astype(bool)
    _check_nodes(is_split, nodes["left"], nodes["right"], nodes["feature_idx"], np.iinfo(np.int64).max)
    sets = nodes["bitset_idx"][is_split & nodes["is_categorical"].astype(bool)]
    for table in (tree.raw_left_cat_bitsets, tree.binned_left_cat_bitsets):
        _check(table.ndim == 2 and table.shape[1] == _BITSET_WORDS and (sets < len(table)).all())


def _check_nodes(
    is_split: npt.NDArray[np.bool_],
    left: npt.NDArray[Any],
    right: npt.NDArray[Any],
    feature: npt.NDArray[Any],
    num_features: int,
) -> None:
    """Check nodes, ``[nodes]`` each: children come after their parent, as in a fit, so no walk turns in circles."""
    index = np.arange(len(is_split))
    _check(len(index) > 0)
    for child in (left, right):
        wide = child.astype(np.int64)[is_split]
        _check(((wide > index[is_split]) & (wide < len(index))).all())
    features = feature.astype(np.int64)[is_split]
    _check(((features >= 0) & (features < num_features)).all())


def _check_holder(estimator: Any) -> None:
    """Check an estimator's number of columns, which it looks at itself and its trees rely on."""
    fields = vars(estimator)
    if "tree_" in fields:
        _check(fields["n_features_in_"] == fields["tree_"].n_features)
    family = type(estimator).__module__
    members = np.ravel(np.array(fields.get("estimators_", ()), dtype=object))
    if family == "sklearn.ensemble._forest":
        _check(all(member.n_features_in_ == estimator.n_features_in_ for member in members))
    elif family == "sklearn.ensemble._gb":
        _check(fields["estimators_"].shape[1:] == (fields["n_trees_per_iteration_"],))
        _check(all(member.tree_.n_outputs == 1 for member in members))
        _check(all(member.n_features_in_ == estimator.n_features_in_ for member in members))
    elif family == "sklearn.ensemble._iforest":
        takes_all = fields["_max_features"] == estimator.n_features_in_
        widths = [estimator.n_features_in_ if takes_all else len(each) for each in fields["estimators_features_"]]
        _check([member.n_features_in_ for member in members] == widths)
    elif "_predictors" in fields:
        _check_histogram_boosting(estimator)


def _check_histogram_boosting(estimator: Any) -> None:
    binning, width = estimator._bin_mapper, estimator.n_features_in_
    _check(len(binning.is_categorical_) == len(binning.bin_thresholds_) == width)
    for is_category, edges in zip(binning.is_categorical_, binning.bin_thresholds_, strict=True):
        _check(not is_category or bool(((edges >= 0) & (edges < 32 * _BITSET_WORDS)).all()))
    for tree in (tree for stage in estimator._predictors for tree in stage):
        is_split = ~tree.nodes["is_leaf"].astype(bool)
        _check((tree.nodes["feature_idx"][is_split].astype(np.int64) < width).all())


def _check(is_sound: Any) -> None:
    if not is_sound:
        raise InvalidInputError(
            "a tree in it points outside its tables, so it is damaged or forged; if you trust its maker all the same, "
            "pass --trust-code (trust_code=True)"
        )
