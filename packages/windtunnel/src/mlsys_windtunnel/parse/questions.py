"""Questions about one fitted estimator: what it wraps, what it hands on, which answers it has and what its labels are.

Read wherever a pipeline is taken apart: :mod:`.pipeline`, :mod:`.source`, :mod:`.members` and the converters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mlsys_windtunnel.parse.graph import METHODS
from mlsys_windtunnel.parse.names import known_name

ANSWERS = ("predict", "predict_proba", "decision_function")

# Estimators that hand all they are asked to another, and where they keep it
WRAPPERS = {
    "sklearn.gaussian_process.GaussianProcessClassifier": "base_estimator_",
    "sklearn.frozen.FrozenEstimator": "estimator",
    "sklearn.semi_supervised.SelfTrainingClassifier": "estimator_",
}


def within(estimator: Any) -> Any | None:
    """Return the fitted estimator that another hands all it is asked to; None if it is none of that kind."""
    best = vars(estimator).get("best_estimator_")  # a parameter search predicts with its best
    if best is not None:
        return best
    attribute = WRAPPERS.get(known_name(type(estimator)))
    return None if attribute is None else vars(estimator).get(attribute)


def outermost(estimator: Any) -> Any:
    """Return the estimator that the input of a pipeline or a search reaches as it is."""
    from sklearn.pipeline import Pipeline

    if isinstance(estimator, Pipeline):
        first = next((step for _, step in estimator.steps if not passes(step)), None)
        return estimator if first is None else outermost(first)
    inner = within(estimator)
    return estimator if inner is None else outermost(inner)


def passes(step: Any) -> bool:
    """Return whether a step hands on what it is given, and looks at nothing; samplers do nothing but in a fit."""
    if step is None or isinstance(step, str) or hasattr(step, "fit_resample"):
        return True
    return is_function(step) and step.func is None


def is_function(estimator: Any) -> bool:
    """Return whether a function that looks at nothing before it computes."""
    return known_name(type(estimator)) == "sklearn.preprocessing.FunctionTransformer" and not estimator.validate


def makes_frames(estimator: Any) -> bool:
    """Return whether ``set_output``, or scikit-learn's setting for all, makes an estimator hand on frames."""
    from sklearn.utils._set_output import _get_output_config

    return bool(_get_output_config("transform", estimator)["dense"] != "default")


def as_fitted(estimator: Any) -> Any:
    """Return what tells whether an estimator is fitted: itself, or the estimator within a fixed threshold."""
    is_fixed = known_name(type(estimator)) == "sklearn.model_selection.FixedThresholdClassifier"
    return estimator.estimator if is_fixed and "estimator_" not in vars(estimator) else estimator


def ordered(methods: Iterable[str]) -> tuple[str, ...]:
    """Return the methods without repetition, in the order of METHODS."""
    wanted = set(methods)
    return tuple(method for method in METHODS if method in wanted)


def offered(estimator: Any, methods: Sequence[str] = ANSWERS) -> tuple[str, ...]:
    """Return those of the methods that a fitted estimator has."""
    return tuple(method for method in methods if hasattr(estimator, method))


def labels_of(estimator: Any) -> Any:
    """Return ``classes_`` of a classifier of one output, else None; CatBoost's regressors have some, but none in it."""
    classes = getattr(estimator, "classes_", None)
    return classes if isinstance(classes, np.ndarray) and classes.ndim == 1 and len(classes) else None


def has_one_output(estimator: Any) -> bool:
    """Return whether a predictor's ``predict`` gives one value for each row, as far as it tells."""
    if getattr(estimator, "multilabel_", False):
        return False
    classes = getattr(estimator, "classes_", None)
    return classes is None or len(classes) == 0 or labels_of(estimator) is not None


def labels_are_indices(estimator: Any) -> bool:
    """Return whether a classifier's labels are 0, 1, 2 and so on: their own indices in ``classes_``."""
    classes = labels_of(estimator)
    return classes is not None and classes.dtype.kind in "iuf" and bool((classes == np.arange(len(classes))).all())


def is_tree(estimator: Any) -> bool:
    """Return whether this is one of scikit-learn's trees: ensembles of these alone have a tensor form of their own."""
    return known_name(type(estimator)).startswith("sklearn.tree.") and hasattr(estimator, "tree_")


def is_constant(estimator: Any) -> bool:
    """Return whether this is the stand-in that one-vs-rest and its kin fit where only one class was seen."""
    return known_name(type(estimator)) == "sklearn.multiclass._ConstantPredictor"


def score_method(estimator: Any) -> str:
    """Return what one-vs-rest and its kin compare: decision values, else probabilities; a regressor's own values."""
    from sklearn.base import is_regressor

    if is_regressor(estimator):
        return "predict"
    return "decision_function" if hasattr(estimator, "decision_function") else "predict_proba"
