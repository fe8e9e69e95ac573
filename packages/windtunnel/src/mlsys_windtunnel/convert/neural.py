"""Multi-layer perceptrons, and the dummies that a pipeline is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.convert.linear import SPARSE_LABELS, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, Regressor
from mlsys_windtunnel.modules.linear.neural import Constant, Layers, MultilabelProbabilities

CONVERTERS = Converters()

ANSWERS = ("predict", "predict_proba", "predict_log_proba")


@CONVERTERS.of("sklearn.neural_network", "MLPClassifier")
def mlp_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert: a logistic output for two classes, a softmax for more, a logistic output for each of several labels."""
    layers = Layers(estimator.coefs_, estimator.intercepts_, hidden=estimator.activation)
    if estimator._label_binarizer.y_type_.startswith("multilabel"):
        if estimator._label_binarizer.sparse_input_:
            return Unsupported(SPARSE_LABELS)
        return MultilabelProbabilities(layers)
    if len(estimator.classes_) < 2:  # the source says that the only class is improbable
        return Unsupported("a fit on one class; fit it on two or more")
    return Classifier(
        layers,
        classes=class_labels(estimator.classes_),
        link="logistic" if len(estimator.classes_) == 2 else "softmax",
        answers=ANSWERS,
    )


@CONVERTERS.of("sklearn.neural_network", "MLPRegressor")
def mlp_regressor(estimator: Any) -> OperatorModule:
    """Convert a network; with the Poisson loss it ends in an exponential."""
    return Regressor(
        Layers(estimator.coefs_, estimator.intercepts_, hidden=estimator.activation, last=estimator.out_activation_)
    )


@CONVERTERS.of("sklearn.dummy", "DummyClassifier")
def dummy_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert the answers that do not depend on chance, for one output."""
    if estimator.n_outputs_ != 1 or estimator.sparse_output_:
        return Unsupported("several outputs, or a sparse one; fit one classifier for each")
    priors = np.asarray(estimator.class_prior_)
    if estimator.strategy == "prior":
        probabilities = priors
    elif estimator.strategy == "most_frequent":
        probabilities = np.eye(len(priors))[priors.argmax()]
    elif estimator.strategy == "constant":
        probabilities = np.ravel(estimator.classes_ == np.ravel(estimator.constant)).astype(np.float64)
    else:
        return Unsupported(
            f"strategy={estimator.strategy!r}, which draws at random; fit it with prior or most_frequent"
        )
    return Classifier(
        Constant(probabilities), classes=class_labels(estimator.classes_), link="identity", answers=ANSWERS
    )


@CONVERTERS.of("sklearn.dummy", "DummyRegressor")
def dummy_regressor(estimator: Any) -> OperatorModule:
    """Convert a mean, median, quantile or constant."""
    return Regressor(Constant(estimator.constant_), is_flat=estimator.n_outputs_ == 1)
