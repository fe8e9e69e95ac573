"""Predictors' answers from scores, as their modules' methods give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.backends.direct.beside import TreesAndNetworks
from mlsys_windtunnel.backends.direct.forms import Floats, Form
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Regressor
from mlsys_windtunnel.modules.linear.native import NativeLinear
from mlsys_windtunnel.modules.tree.heads import TreeClassifier
from mlsys_windtunnel.modules.tree.native import NativeTrees

Answer = Callable[..., npt.NDArray[Any]]  # of the predictor's inputs, in the source's shape; labels are class indices


def answers(predictor: PredictorModule, scores: Form) -> dict[str, Answer]:
    """Return answers by method; the module makes those that are not there of the scores.

    Args:
        predictor: The head.
        scores: The form of its ``forward``.
    """
    if type(predictor) is Regressor:
        return {"predict": _flat(scores) if predictor.is_flat else scores}
    if type(predictor) is Classifier and len(predictor.classes) > 1:
        return _of_classes(predictor, scores, slope=1.0)
    if type(predictor) is TreeClassifier and len(predictor.classes) > 1 and predictor.is_normalised:
        return _of_classes(predictor, scores, slope=predictor.slope)
    return {}


def _of_classes(predictor: Classifier, scores: Form, *, slope: float) -> dict[str, Answer]:
    if predictor.link == "identity":
        return {"predict_proba": scores, "predict": _likeliest(scores)} if slope == 1 else {}
    decides = getattr(predictor, "decides", "positive")
    found: dict[str, Answer] = {"decision_function": _flat(scores)}
    if decides != "likeliest":  # else rounding of probabilities decides, which is the module's affair
        found["predict"] = _likeliest(scores) if len(predictor.classes) > 2 else _second(scores, decides)
    if len(predictor.classes) > 2:
        if predictor.link == "softmax" and not isinstance(scores, TreesAndNetworks):  # whose bits are torch's
            found["predict_proba"] = _softmax(scores, slope)
    elif predictor.link == "logistic" and isinstance(scores, NativeTrees | NativeLinear):
        found["predict_proba"] = partial(scores, slope=slope)
    return found


def _second(scores: Form, decides: str) -> Answer:
    """Return the answer 1 where the margin is for the second class, else 0."""
    is_second = np.greater if decides == "positive" else np.greater_equal
    return lambda *x: is_second(scores(*x)[:, 0], 0).astype(np.int64)


def _flat(scores: Form) -> Answer:
    def flat(*x: Floats) -> Floats:
        table = scores(*x)
        return table[:, 0] if table.shape[1] == 1 else table

    return flat


def _likeliest(scores: Form) -> Answer:
    return lambda *x: scores(*x).argmax(axis=1)


def _softmax(scores: Form, slope: float) -> Answer:
    def probabilities(*x: Floats) -> Floats:
        scaled = scores(*x) * slope
        scaled -= scaled.max(axis=1, keepdims=True)
        np.exp(scaled, out=scaled)
        scaled /= scaled.sum(axis=1, keepdims=True)
        return scaled

    return probabilities
