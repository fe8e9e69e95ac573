"""scikit-learn's gradient boosting: over decision trees, and over histograms.

Trees of the former compare float32 inputs, those of the latter float64. Histogram boosting encodes categories itself,
and puts their codes before all numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.convert.trees_lookup import EncodedLookup
from mlsys_windtunnel.convert.trees_sklearn import tree_of
from mlsys_windtunnel.host.lookup import is_missing
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, bitset_codes, join_trees
from mlsys_windtunnel.modules.tree.heads import CategoryCodes, Coded, Mapped, Output, TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees

CONVERTERS = Converters()

_ANSWERS = ("predict", "predict_proba", "predict_log_proba", "decision_function")
_CONSTANT = ("prior", "most_frequent", "constant")  # strategies of DummyClassifier that draw nothing at random
_DECLINED_INIT = "init={}, an estimator that reads its input; fit it with init=None or 'zero'"
_OUTPUTS: dict[str, Output] = {"IdentityLink": "identity", "LogLink": "exp"}


@CONVERTERS.of("sklearn.ensemble", "GradientBoostingClassifier")
def gradient_boosting_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert the losses log_loss and exponential; decline an ``init`` that looks at its input."""
    trees = _boosted(estimator)
    if trees is None:
        return Unsupported(_DECLINED_INIT.format(type(estimator.init_).__name__))
    return TreeClassifier(
        trees,
        classes=class_labels(estimator.classes_),
        link="logistic" if trees.num_groups == 1 else "softmax",
        answers=_ANSWERS,
        slope=2.0 if estimator.loss == "exponential" else 1.0,
        decides="non-negative",
    )


@CONVERTERS.of("sklearn.ensemble", "GradientBoostingRegressor")
def gradient_boosting_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert all losses; decline an ``init`` that looks at its input."""
    trees = _boosted(estimator)
    if trees is None:
        return Unsupported(_DECLINED_INIT.format(type(estimator.init_).__name__))
    return Regressor(trees)


def _boosted(estimator: Any) -> Trees | None:
    init = estimator.init_
    if init != "zero":
        from sklearn.dummy import DummyClassifier, DummyRegressor

        is_constant = type(init) is DummyRegressor or (type(init) is DummyClassifier and init.strategy in _CONSTANT)
        if not is_constant:
            return None
    stages = estimator.estimators_
    trees = [tree_of(tree, tree.tree_.value[:, 0, 0] * estimator.learning_rate) for tree in stages.ravel()]
    row = np.zeros((1, estimator.n_features_in_))
    return Trees(
        join_trees(trees, num_features=estimator.n_features_in_, rounds_to_float32=True),
        bias=estimator._raw_predict_init(row),  # what all rows start from, of any loss and constant
        num_groups=stages.shape[1],
    )


@CONVERTERS.of("sklearn.ensemble", "HistGradientBoostingClassifier")
def hist_gradient_boosting_classifier(estimator: Any) -> Converted:
    """Convert a classifier of two classes or more."""
    trees = _histogram_boosted(estimator)
    body, lookup = _coded(estimator, trees)
    head = TreeClassifier(
        body,
        classes=class_labels(estimator.classes_),
        link="logistic" if trees.num_groups == 1 else "softmax",
        answers=[method for method in _ANSWERS if hasattr(estimator, method)],
    )
    return Converted(head, lookup, num_codes=estimator.n_features_in_)


@CONVERTERS.of("sklearn.ensemble", "HistGradientBoostingRegressor")
def hist_gradient_boosting_regressor(estimator: Any) -> Converted | Unsupported:
    """Convert all losses: the logarithm and the identity are the links that they have."""
    output = _OUTPUTS.get(type(estimator._loss.link).__name__)
    if output is None:
        return Unsupported(f"loss={estimator.loss!r}, whose link is not known here")
    body, lookup = _coded(estimator, _histogram_boosted(estimator))
    return Converted(Regressor(Mapped(body, output)), lookup, num_codes=estimator.n_features_in_)


def _histogram_boosted(estimator: Any) -> Trees:
    trees = [_histogram_tree(predictor) for stage in estimator._predictors for predictor in stage]
    ensemble: TreeEnsemble = join_trees(trees, num_features=estimator.n_features_in_)
    return Trees(ensemble, bias=estimator._baseline_prediction, num_groups=estimator.n_trees_per_iteration_)


def _histogram_tree(predictor: Any) -> Tree:
    nodes = predictor.nodes
    is_leaf = nodes["is_leaf"].astype(bool)
    categorical = np.flatnonzero(nodes["is_categorical"].astype(bool) & ~is_leaf)
    return Tree.of_nodes(
        is_leaf=is_leaf,
        feature=nodes["feature_idx"],
        threshold=nodes["num_threshold"],
        left=nodes["left"],
        right=nodes["right"],
        missing_left=nodes["missing_go_to_left"],
        value=nodes["value"],
        left_categories={
            int(node): bitset_codes(predictor.raw_left_cat_bitsets[nodes["bitset_idx"][node]]) for node in categorical
        },
    )


def _coded(estimator: Any, trees: Trees) -> tuple[Trees | Coded, EncodedLookup | None]:
    """Put codes of categories before the trees: in the network if categories are numbers, else on the host."""
    encoded = estimator._preprocessor
    if encoded is None:
        return trees, None
    is_category = np.asarray(estimator.is_categorical_, bool)
    indices, others = np.flatnonzero(is_category), np.flatnonzero(~is_category)
    known = encoded.named_transformers_["encoder"].categories_
    categories = {
        int(index): values[[not is_missing(value) for value in values.tolist()]]  # a missing value stays missing
        for index, values in zip(indices, known, strict=True)
    }
    if all(values.dtype.kind in "iufb" and np.isfinite(values).all() for values in categories.values()):
        numbers = [values.astype(np.float64) for values in categories.values()]
        return Coded(CategoryCodes(numbers, columns=indices, others=others), trees), None
    return trees, EncodedLookup(categories, [*indices.tolist(), *others.tolist()])
