"""scikit-learn's isolation forest, and bagging and AdaBoost over plain decision trees, as one ensemble of trees each.

Bagging and AdaBoost over other members are declined here: their members become operators of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.convert.trees_sklearn import PROBABILISTIC, leaf_values, tree_of
from mlsys_windtunnel.modules.base import OperatorModule, OutlierDetector, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, join_trees, with_features
from mlsys_windtunnel.modules.tree.heads import IsolationScores, Margin, TreeClassifier, WeightedMedianOfTrees
from mlsys_windtunnel.modules.tree.trees import Trees

CONVERTERS = Converters()

_DECLINED_MEMBERS = "members that are neither all trees nor all classifiers of one output, or a fit on one class"

_CLASSIFIERS = ("DecisionTreeClassifier", "ExtraTreeClassifier")
_REGRESSORS = ("DecisionTreeRegressor", "ExtraTreeRegressor")


@CONVERTERS.of("sklearn.ensemble", "IsolationForest")
def isolation_forest(estimator: Any) -> OperatorModule:
    """Convert to trees that score a row by the mean length of its ways to leaves (Liu, Ting and Zhou, ICDM 2008)."""
    trees = []
    for member, features in zip(estimator.estimators_, estimator.estimators_features_, strict=True):
        tree = member.tree_
        length = tree.compute_node_depths() - 1.0 + _mean_path_length(tree.n_node_samples)  # depths count the root as 1
        trees.append(with_features(tree_of(member, length), features))
    most = float(_mean_path_length(np.array([estimator.max_samples_]))[0])
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    offset = float(estimator.offset_)
    scores = IsolationScores(Trees(ensemble), longest=len(trees) * most, offset=offset)
    answers = ("predict", "decision_function", "score_samples")
    return OutlierDetector(scores, includes_zero=True, answers=answers, offset=offset)


@CONVERTERS.of("sklearn.ensemble", "BaggingClassifier")
def bagging_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to the mean of trees' probabilities; a tree may have seen fewer classes."""
    if not _are_trees(estimator, _CLASSIFIERS):
        return Unsupported(_DECLINED_MEMBERS)
    values = []
    for member in estimator.estimators_:
        value = np.zeros((member.tree_.node_count, len(estimator.classes_)))
        value[:, member.classes_.astype(np.int64)] = leaf_values(member)  # members were fitted on indices of labels
        values.append(value)
    trees = Trees(_in_subsets(estimator, values), divisor=len(values))
    return TreeClassifier(trees, classes=class_labels(estimator.classes_), link="identity", answers=PROBABILISTIC)


@CONVERTERS.of("sklearn.ensemble", "BaggingRegressor")
def bagging_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to the mean of trees."""
    if not _are_trees(estimator, _REGRESSORS):
        return Unsupported(_DECLINED_MEMBERS)
    values = [leaf_values(member) for member in estimator.estimators_]
    return Regressor(Trees(_in_subsets(estimator, values), divisor=len(values)))


@CONVERTERS.of("sklearn.ensemble", "AdaBoostClassifier")
def ada_boost_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to weighted votes of trees (SAMME: Zhu, Zou, Rosset and Hastie, 2009)."""
    num_classes = len(estimator.classes_)
    if not _are_trees(estimator, _CLASSIFIERS) or num_classes < 2:
        return Unsupported(_DECLINED_MEMBERS)
    trees = []
    for member, weight in zip(estimator.estimators_, estimator.estimator_weights_, strict=False):
        voted = member.classes_[leaf_values(member).argmax(1)]
        votes = np.where(voted[:, None] == estimator.classes_, weight, -1 / (num_classes - 1) * weight)
        trees.append(tree_of(member, votes))
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    votes = Trees(ensemble, divisor=float(estimator.estimator_weights_.sum()))
    return TreeClassifier(
        Margin(votes) if num_classes == 2 else votes,
        classes=class_labels(estimator.classes_),
        link="logistic" if num_classes == 2 else "softmax",
        answers=(*PROBABILISTIC, "decision_function"),
        slope=1.0 if num_classes == 2 else 1 / (num_classes - 1),
    )


@CONVERTERS.of("sklearn.ensemble", "AdaBoostRegressor")
def ada_boost_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to the weighted median of trees (AdaBoost.R2: Drucker, 1997)."""
    if not _are_trees(estimator, _REGRESSORS):
        return Unsupported(_DECLINED_MEMBERS)
    trees = [tree_of(member) for member in estimator.estimators_]
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    return Regressor(WeightedMedianOfTrees(Trees(ensemble), estimator.estimator_weights_[: len(trees)]))


def _are_trees(estimator: Any, kinds: tuple[str, ...]) -> bool:
    return all(
        type(member).__module__.startswith("sklearn.tree.") and type(member).__name__ in kinds
        for member in estimator.estimators_
    )


def _in_subsets(estimator: Any, values: list[npt.NDArray[np.float64]]) -> TreeEnsemble:
    """Join members over the features that each was fitted on."""
    trees: list[Tree] = [
        with_features(tree_of(member, value), features)
        for member, value, features in zip(estimator.estimators_, values, estimator.estimators_features_, strict=True)
    ]
    return join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)


def _mean_path_length(num_rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the mean path length of an isolation tree grown on so many rows (equation 1 of the paper)."""
    rows = np.maximum(num_rows.astype(np.float64), 3)
    length = 2 * (np.log(rows - 1) + np.euler_gamma) - 2 * (rows - 1) / rows
    return np.where(num_rows <= 1, 0.0, np.where(num_rows == 2, 1.0, length))
