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
from torch import nn

from mlsys_windtunnel.convert.linear import PROBABILISTIC, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, Regressor
from mlsys_windtunnel.modules.kernel.centroid import NearestCentroid
from mlsys_windtunnel.modules.kernel.metrics import METRICS, Distance, as_metric
from mlsys_windtunnel.modules.kernel.neighbors import NeighborAverage, OutputVotes

CONVERTERS = Converters()

POWERS = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "cityblock": 1.0}
POWERS |= {"chebyshev": np.inf, "infinity": np.inf}


@CONVERTERS.of("sklearn.neighbors", "KNeighborsClassifier")
def k_neighbors_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to votes of the neighbours, for each output where there are several."""
    outputs = estimator.classes_ if estimator.outputs_2d_ else [estimator.classes_]
    return voting(
        estimator, _average(estimator, one_hot(estimator, outputs), votes=[len(labels) for labels in outputs])
    )


@CONVERTERS.of("sklearn.neighbors", "KNeighborsRegressor")
def k_neighbors_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to averages of the neighbours' targets."""
    targets = np.asarray(estimator._y, np.float64)
    body = _average(estimator, targets.reshape(len(targets), -1))
    return body if isinstance(body, Unsupported) else Regressor(body, is_flat=targets.ndim == 1)


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


def voting(estimator: Any, body: nn.Module | Unsupported) -> OperatorModule | Unsupported:
    """Return the classifier whose probabilities ``body`` gives, for each output where there are several."""
    if isinstance(body, Unsupported):
        return body
    if estimator.outputs_2d_:
        return OutputVotes(body, outputs=[class_labels(labels) for labels in estimator.classes_])
    return Classifier(
        body, classes=class_labels(estimator.classes_), link="identity", answers=("predict", "predict_proba")
    )


def _average(
    estimator: Any, values: npt.NDArray[np.float64], *, votes: Sequence[int] = ()
) -> NeighborAverage | Unsupported:
    """Make the average; decline metrics and weights by a function."""
    found = weighed_distance_of(estimator)
    if isinstance(found, Unsupported):
        return found
    p, scale, distance = found
    return NeighborAverage(
        samples_of(estimator),
        values,
        k=estimator.n_neighbors,
        p=p,
        scale=scale,
        by_distance=estimator.weights == "distance",
        by_product=is_by_product(estimator, p),
        votes=votes,
        distance=distance,
    )


def weighed_distance_of(
    estimator: Any,
) -> tuple[float, npt.NDArray[np.float64] | None, Distance | None] | Unsupported:
    """Return :func:`distance_of` an average; decline weights by a function."""
    if estimator.weights not in ("uniform", "distance", None):
        return Unsupported(f"weights={spelt(estimator.weights)}; fit it with 'uniform' or 'distance'")
    return distance_of(estimator, estimator.effective_metric_)


def distance_of(
    estimator: Any, metric: Any
) -> tuple[float, npt.NDArray[np.float64] | None, Distance | None] | Unsupported:
    """Return the order of a Minkowski distance and the factors of features, or another distance."""
    given = dict(estimator.effective_metric_params_)
    if isinstance(metric, str) and metric in POWERS:
        return POWERS[metric], None, None
    if metric in ("minkowski", "p"):
        p, weights = float(given.get("p", 2.0)), given.get("w")
        return p, None if weights is None else np.asarray(weights, np.float64) ** (1 / p), None
    if metric == "seuclidean" and "V" in given:  # else its variances are of the rows asked about, too
        return 2.0, 1 / np.sqrt(np.asarray(given["V"], np.float64)), None
    if metric == "mahalanobis" and ("VI" in given or "V" in given):
        inverse = np.asarray(given["VI"], np.float64) if "VI" in given else np.linalg.inv(given["V"])
        return 2.0, None, Distance("minkowski", rotation=np.linalg.cholesky((inverse + inverse.T) / 2))
    known = as_metric(metric) if isinstance(metric, str) else None
    is_plain = not {name for name, value in given.items() if value is not None and name != "missing_values"}
    if known is None or not is_plain:
        with_options = "" if is_plain else f" with metric_params={given!r:.60}"
        others = ", ".join(sorted({*POWERS, *METRICS, "mahalanobis with VI", "seuclidean with V"}))
        return Unsupported(f"metric={spelt(metric)}{with_options}; fit it with one of {others}")
    return 2.0, None, Distance(known)


def one_hot(estimator: Any, outputs: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return the samples' classes one-hot, those of several outputs side by side, ``[samples, sum of classes]``."""
    codes = estimator._y.reshape(len(estimator._y), len(outputs)).T
    votes = [np.eye(len(labels))[indices] for labels, indices in zip(outputs, codes, strict=True)]
    return np.concatenate(votes, axis=1)


def samples_of(estimator: Any) -> npt.NDArray[Any]:
    """Return the stored samples as a dense table."""
    samples = estimator._fit_X
    return np.asarray(samples.toarray() if hasattr(samples, "toarray") else samples)


def is_by_product(estimator: Any, p: float) -> bool:
    """Return whether the source expands squares of distances into a matrix product."""
    by_squares = p == 2 or estimator.effective_metric_ in ("cosine", "sqeuclidean", "nan_euclidean")
    return bool(estimator._fit_method == "brute" and by_squares)


def spelt(option: Any) -> str:
    """Return an option as messages show it."""
    return repr(option) if isinstance(option, str) else f"the function {getattr(option, '__name__', option)}"
