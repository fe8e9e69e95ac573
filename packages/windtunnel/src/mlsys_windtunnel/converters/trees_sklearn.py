"""scikit-learn's decision trees and forests.

They compare float32 inputs with float64 thresholds, and send missing values where a fit with missing values learnt to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.converters.linear import class_labels
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.tree_ensemble import Tree, join_trees
from mlsys_windtunnel.modules.tree_heads import TreeClassifier
from mlsys_windtunnel.modules.trees import Trees

PROBABILISTIC = ("predict", "predict_proba", "predict_log_proba")


def tree_of(estimator: Any, value: npt.ArrayLike | None = None) -> Tree:
    """A decision tree; ``value`` ``[nodes]`` or ``[nodes, outputs]`` in place of its own."""
    tree = estimator.tree_
    return Tree.of_nodes(
        is_leaf=tree.children_left == -1,
        feature=tree.feature,
        threshold=tree.threshold,
        left=tree.children_left,
        right=tree.children_right,
        missing_left=tree.missing_go_to_left,
        value=leaf_values(estimator) if value is None else value,
    )


def leaf_values(estimator: Any) -> npt.NDArray[np.float64]:
    """Of a tree's nodes: the share of each class, or the value of each output; ``[nodes, classes or outputs]``."""
    values: npt.NDArray[np.float64] = estimator.tree_.value
    return values[:, :, 0] if values.shape[2] == 1 and not hasattr(estimator, "classes_") else values[:, 0, :]


def tree_regressor(estimator: Any) -> OperatorModule:
    """One tree, one or several outputs."""
    return _regressor([estimator], estimator)


def forest_regressor(estimator: Any) -> OperatorModule:
    """The mean of trees."""
    return _regressor(estimator.estimators_, estimator)


def tree_classifier(estimator: Any) -> OperatorModule | None:
    """One tree; several outputs at once are declined."""
    return _classifier([estimator], estimator)


def forest_classifier(estimator: Any) -> OperatorModule | None:
    """The mean of trees' probabilities; several outputs at once are declined."""
    return _classifier(estimator.estimators_, estimator)


def _regressor(members: Any, estimator: Any) -> OperatorModule:
    trees = [tree_of(member) for member in members]
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    return Regressor(Trees(ensemble, divisor=len(trees)))


def _classifier(members: Any, estimator: Any) -> OperatorModule | None:
    if estimator.n_outputs_ > 1:
        return None
    trees = [tree_of(member) for member in members]
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    return TreeClassifier(
        Trees(ensemble, divisor=len(trees)),
        classes=class_labels(estimator.classes_),
        link="identity",
        answers=PROBABILISTIC,
    )
