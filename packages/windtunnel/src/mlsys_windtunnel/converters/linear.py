"""Linear models: an affine map, and for classifiers a link."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.modules.base import Classifier, Link, OperatorModule, Regressor
from mlsys_windtunnel.modules.linear import Affine


def linear_regressor(estimator: Any) -> OperatorModule:
    """Any regressor with ``coef_`` and ``intercept_``."""
    return Regressor(Affine(estimator.coef_, estimator.intercept_), is_flat=np.ndim(estimator.coef_) == 1)


def logistic_regression(estimator: Any) -> OperatorModule:
    """Multinomial for three classes and more unless fitted one-vs-rest (liblinear)."""
    is_binary = len(estimator.classes_) == 2
    link: Link = "logistic" if is_binary else "one-vs-rest" if estimator.solver == "liblinear" else "softmax"
    return Classifier(
        Affine(estimator.coef_, estimator.intercept_),
        classes=estimator.classes_.tolist(),
        link=link,
        answers=("predict", "predict_proba", "predict_log_proba", "decision_function"),
    )
