"""Nearest neighbours and nearest centroids.

Neighbours are found by exact search whatever the source's algorithm. Where stored samples lie at the same distance and
only some are among the ``k`` nearest, the source's algorithm decides which: such rows are reported
(``modules/ties.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.linear import PROBABILISTIC, class_labels
from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, Regressor
from mlsys_windtunnel.modules.kernel.neighbors import NearestCentroid, NeighborAverage, OutputVotes

CONVERTERS = Converters()

POWERS = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "cityblock": 1.0, "chebyshev": np.inf}


@CONVERTERS.of("sklearn.neighbors", "KNeighborsClassifier")
def k_neighbors_classifier(estimator: Any) -> OperatorModule | None:
    """Convert to votes of the neighbours, for each output where there are several."""
    outputs = estimator.classes_ if estimator.outputs_2d_ else [estimator.classes_]
    codes = estimator._y.reshape(len(estimator._y), len(outputs)).T
    votes = [np.eye(len(labels))[indices] for labels, indices in zip(outputs, codes, strict=True)]
    body = _average(estimator, np.concatenate(votes, axis=1), votes=[len(labels) for labels in outputs])
    if body is None:
        return None
    if estimator.outputs_2d_:
        return OutputVotes(body, outputs=[class_labels(labels) for labels in outputs])
    return Classifier(
        body, classes=class_labels(estimator.classes_), link="identity", answers=("predict", "predict_proba")
    )


@CONVERTERS.of("sklearn.neighbors", "KNeighborsRegressor")
def k_neighbors_regressor(estimator: Any) -> OperatorModule | None:
    """Convert to averages of the neighbours' targets."""
    targets = np.asarray(estimator._y, np.float64)
    body = _average(estimator, targets.reshape(len(targets), -1))
    return None if body is None else Regressor(body, is_flat=targets.ndim == 1)


@CONVERTERS.of("sklearn.neighbors", "NearestCentroid")
def nearest_centroid(estimator: Any) -> OperatorModule | None:
    """Convert; Manhattan distances give labels alone."""
    deviations = estimator.within_class_std_dev_
    priors = estimator.class_prior_
    return NearestCentroid(
        estimator.centroids_,
        deviations=np.where(deviations == 0, 1, deviations),
        log_priors=np.log(priors),
        classes=class_labels(estimator.classes_),
        p=POWERS[estimator.metric],
        predicts_by_distance=bool(np.isclose(priors, 1 / len(priors)).all()),
        answers=PROBABILISTIC if estimator.metric == "euclidean" else ("predict",),
    )


def _average(estimator: Any, values: npt.NDArray[np.float64], *, votes: Sequence[int] = ()) -> NeighborAverage | None:
    """Make the average; None for metrics other than Minkowski's, and for weights by a function."""
    if estimator.weights not in ("uniform", "distance", None):
        return None
    p, scale = POWERS.get(estimator.effective_metric_), None
    if estimator.effective_metric_ == "minkowski":
        p, weights = estimator.effective_metric_params_["p"], estimator.effective_metric_params_.get("w")
        scale = None if weights is None else np.asarray(weights, np.float64) ** (1 / p)
    if p is None:
        return None
    samples = estimator._fit_X
    return NeighborAverage(
        samples.toarray() if hasattr(samples, "toarray") else samples,
        values,
        k=estimator.n_neighbors,
        p=float(p),
        scale=scale,
        by_distance=estimator.weights == "distance",
        by_product=estimator._fit_method == "brute" and p == 2,
        votes=votes,
    )
