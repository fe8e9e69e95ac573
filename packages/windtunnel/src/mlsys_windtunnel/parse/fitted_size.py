"""Counts of what fitting has left in an estimator: parameters, trees and leaves.

One rule for all estimators (numbers in fitted attributes, those whose names end in "_", through nested estimators too)
and one case for each kind of tree. Used by :mod:`mlsys_windtunnel.parse.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlsys_windtunnel.parse.boosters import library_of, package_of
from mlsys_windtunnel.parse.graph import FittedSize

# Fitted attributes that describe the fit or repeat other attributes, rather than being used on new rows.
_NOT_PARAMETERS = frozenset(
    {
        "classes_",
        "classes",
        "feature_names_in_",
        "train_score_",
        "validation_score_",
        "validation_scores_",
        "loss_curve_",
    }
    | {"estimators_features_", "estimators_samples_", "support_", "shape_fit_", "named_estimators_"}
    | {"cv_results_", "explained_variance_ratio_", "labels_", "oob_score_", "estimator_errors_", "singular_"}
)
_PRIVATE_PARAMETERS = frozenset({"_fit_X", "_y", "_baseline_prediction"})  # nearest neighbours, histogram boosting


def fitted_size(estimator: object) -> FittedSize:
    """Return the size of what ``estimator`` and the estimators within it keep.

    Statistics count beside weights: a ``StandardScaler`` of n columns keeps mean, variance and scale, 3 n numbers. A
    tree counts one number a split and those of each leaf.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> fitted_size(Ridge().fit([[0.0, 1.0], [1.0, 0.0]], [0.0, 1.0]))  # two coefficients, one intercept
        FittedSize(num_parameters=3, num_trees=0, num_leaves=0)
    """
    return _size_of_estimator(estimator, set())


def _size_of_estimator(estimator: Any, seen: set[int]) -> FittedSize:
    if id(estimator) in seen:
        return FittedSize()
    seen.add(id(estimator))
    tree = vars(estimator).get("tree_")
    if hasattr(tree, "n_leaves"):  # scikit-learn's decision trees; a tree of neighbours has none
        num_splits = int(tree.node_count - tree.n_leaves)
        return FittedSize(num_splits + int(tree.n_leaves) * int(tree.value[0].size), 1, int(tree.n_leaves))
    if (boosted := _size_of_boosted(estimator)) is not None:
        return boosted
    size = FittedSize()
    for rounds in vars(estimator).get("_predictors", ()):  # scikit-learn's histogram gradient boosting
        for predictor in rounds:
            num_leaves = int(predictor.nodes["is_leaf"].sum())
            size += FittedSize(len(predictor.nodes), 1, num_leaves)
    for value in _fitted_values(estimator):
        size += _size_of_value(value, seen)
    return size


def _fitted_values(estimator: object) -> Iterable[object]:
    is_estimator = hasattr(estimator, "get_params")
    for name, value in vars(estimator).items():
        if name == "transformers_":  # (name, transformer, columns): the columns are no parameters
            yield [transformer for _, transformer, _ in value]
        elif name in _PRIVATE_PARAMETERS or name in ("steps", "transformer_list"):
            yield value
        elif name.startswith(("n_", "_")) or name in _NOT_PARAMETERS:
            continue
        elif name.endswith("_") or not is_estimator:
            yield value


def _size_of_value(value: Any, seen: set[int]) -> FittedSize:
    import numpy as np

    if isinstance(value, float | np.floating):
        return FittedSize(num_parameters=1)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return FittedSize(num_parameters=value.size)
    if hasattr(value, "nnz"):  # a sparse matrix
        return FittedSize(num_parameters=int(value.nnz))
    if isinstance(value, np.ndarray):  # of objects: category names, or estimators
        names = FittedSize(num_parameters=sum(isinstance(item, str | int | None) for item in value.flat))
        return names + _size_of_value(value.ravel().tolist(), seen)
    if isinstance(value, Mapping):
        return _size_of_value(list(value.values()), seen)
    if isinstance(value, list | tuple):
        return sum((_size_of_value(item, seen) for item in value), FittedSize())
    is_part = hasattr(value, "get_params") or type(value).__module__.startswith("sklearn.")
    if is_part and hasattr(value, "__dict__") and not isinstance(value, type):
        return _size_of_estimator(value, seen)
    return FittedSize()


def _size_of_boosted(estimator: Any) -> FittedSize | None:
    """Count the trees that boosters keep to themselves.

    A split counts one number; a leaf counts its own.
    """
    package = package_of(estimator)
    if package == "lightgbm" and hasattr(estimator, "booster_"):
        lines = estimator.booster_.model_to_string().splitlines()
        leaves = [int(line.removeprefix("num_leaves=")) for line in lines if line.startswith("num_leaves=")]
    elif package == "xgboost" and hasattr(estimator, "get_booster"):
        leaves = [tree.count("leaf=") for tree in estimator.get_booster().get_dump()]
    else:
        own_size = library_of(estimator).fitted_size
        return None if own_size is None else own_size(estimator)
    return FittedSize(sum(2 * count - 1 for count in leaves if count), len(leaves), sum(leaves))
