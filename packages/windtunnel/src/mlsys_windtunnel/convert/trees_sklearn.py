"""scikit-learn's decision trees and forests.

They compare float32 inputs with float64 thresholds, and send missing values where a fit with missing values learnt to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, join_trees
from mlsys_windtunnel.modules.tree.heads import TreeClassifier, TreeOutputs
from mlsys_windtunnel.modules.tree.trees import Trees

CONVERTERS = Converters()

PROBABILISTIC = ("predict", "predict_proba", "predict_log_proba")


def tree_of(estimator: Any, value: npt.ArrayLike | None = None) -> Tree:
    """Make a decision tree; ``value`` ``[nodes]`` or ``[nodes, outputs]`` takes the place of its own."""
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
    """Return nodes' values ``[nodes, k]``: shares of each output's classes side by side, or values of outputs."""
    values: npt.NDArray[np.float64] = estimator.tree_.value  # [nodes, outputs, most classes]
    if not hasattr(estimator, "classes_"):
        return values[:, :, 0]
    return np.concatenate([values[:, output, :count] for output, count in enumerate(np.ravel(estimator.n_classes_))], 1)


@CONVERTERS.of("sklearn.ensemble", "ExtraTreesRegressor", "RandomForestRegressor")
@CONVERTERS.of("sklearn.tree", "DecisionTreeRegressor", "ExtraTreeRegressor")
def regressor(estimator: Any) -> OperatorModule:
    """Convert one tree, or the mean of trees; one or several outputs."""
    return Regressor(_mean(estimator))


@CONVERTERS.of("sklearn.ensemble", "ExtraTreesClassifier", "RandomForestClassifier")
@CONVERTERS.of("sklearn.tree", "DecisionTreeClassifier", "ExtraTreeClassifier")
def classifier(estimator: Any) -> OperatorModule:
    """Convert one tree, or the mean of trees' probabilities; one or several outputs."""
    trees = _mean(estimator)
    if estimator.n_outputs_ > 1:
        return TreeOutputs(
            trees, outputs=[class_labels(labels) for labels in estimator.classes_], answers=PROBABILISTIC
        )
    classes = class_labels(estimator.classes_)
    return TreeClassifier(trees, classes=classes, link="identity", answers=PROBABILISTIC)


def _mean(estimator: Any) -> Trees:
    trees = [tree_of(member) for member in getattr(estimator, "estimators_", [estimator])]
    ensemble = join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True)
    return Trees(ensemble, divisor=len(trees))
