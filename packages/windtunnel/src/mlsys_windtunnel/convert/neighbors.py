"""Nearest neighbours and centroids, neighbours within a radius, local outlier factors, label propagation.

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

from mlsys_windtunnel.convert.decompose import make_kernel
from mlsys_windtunnel.convert.linear import PROBABILISTIC, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.host.raw_table import raw
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, OutlierDetector, Regressor
from mlsys_windtunnel.modules.kernel.decompose import KernelProjection
from mlsys_windtunnel.modules.kernel.metrics import METRICS, Distance, as_metric
from mlsys_windtunnel.modules.kernel.neighbors import NearestCentroid, NeighborAverage, OutputVotes, Shares
from mlsys_windtunnel.modules.kernel.radius import OutlierFactor, RadiusAverage

CONVERTERS = Converters()

POWERS = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "cityblock": 1.0}
POWERS |= {"chebyshev": np.inf, "infinity": np.inf}


@CONVERTERS.of("sklearn.neighbors", "KNeighborsClassifier")
def k_neighbors_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to votes of the neighbours, for each output where there are several."""
    outputs = estimator.classes_ if estimator.outputs_2d_ else [estimator.classes_]
    return _voting(
        estimator, _average(estimator, _one_hot(estimator, outputs), votes=[len(labels) for labels in outputs])
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


def _voting(estimator: Any, body: nn.Module | Unsupported) -> OperatorModule | Unsupported:
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
    found = _weighed_distance(estimator)
    if isinstance(found, Unsupported):
        return found
    return NeighborAverage(raw(estimator._fit_X), values, k=estimator.n_neighbors, votes=votes, **found)


def _average_within(
    estimator: Any, values: npt.NDArray[np.float64], lonely: npt.NDArray[Any] | None
) -> RadiusAverage | Unsupported:
    if estimator.radius is None:
        return Unsupported("radius=None, by which the source answers nothing; set a number")
    found = _weighed_distance(estimator)
    if isinstance(found, Unsupported):
        return found
    return RadiusAverage(raw(estimator._fit_X), values, lonely=lonely, radius=estimator.radius, **found)


def _weighed_distance(estimator: Any) -> dict[str, Any] | Unsupported:
    """Return the distance and the weights of an average; decline metrics and weights by a function."""
    if estimator.weights not in ("uniform", "distance", None):
        return Unsupported(f"weights={_spelt(estimator.weights)}; fit it with 'uniform' or 'distance'")
    found = _distance(estimator)
    return found if isinstance(found, Unsupported) else {**found, "by_distance": estimator.weights == "distance"}


def _distance(estimator: Any) -> dict[str, Any] | Unsupported:
    """Return arguments of an average: order of a Minkowski distance and factors of features, or another distance."""
    found = _metric(estimator, estimator.effective_metric_)
    if isinstance(found, Unsupported):
        return found
    p, scale, distance = found
    # The source expands squares of distances into a matrix product.
    by_squares = p == 2 or estimator.effective_metric_ in ("cosine", "sqeuclidean", "nan_euclidean")
    by_product = bool(estimator._fit_method == "brute" and by_squares)
    return {"p": p, "scale": scale, "distance": distance, "by_product": by_product}


def _metric(estimator: Any, metric: Any) -> tuple[float, npt.NDArray[np.float64] | None, Distance | None] | Unsupported:
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
        return Unsupported(f"metric={_spelt(metric)}{with_options}; fit it with one of {others}")
    return 2.0, None, Distance(known)


def _one_hot(estimator: Any, outputs: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return the samples' classes one-hot, those of several outputs side by side, ``[samples, sum of classes]``."""
    codes = estimator._y.reshape(len(estimator._y), len(outputs)).T
    votes = [np.eye(len(labels))[indices] for labels, indices in zip(outputs, codes, strict=True)]
    return np.concatenate(votes, axis=1)


def _spelt(option: Any) -> str:
    return repr(option) if isinstance(option, str) else f"the function {getattr(option, '__name__', option)}"


@CONVERTERS.of("sklearn.neighbors", "RadiusNeighborsClassifier")
def radius_neighbors_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to votes of the samples within the radius, for each output where there are several."""
    outputs = estimator.classes_ if estimator.outputs_2d_ else [estimator.classes_]
    given, lonely = estimator.outlier_label_, None
    if given is not None:
        for labels, label in zip(outputs, given, strict=True):
            if label not in labels.tolist():
                return Unsupported(
                    f"outlier_label={label!r}, which is none of the classes {labels.tolist()[:5]}: its probabilities "
                    "are all 0; fit it with one of them or 'most_frequent'"
                )
        lonely = np.concatenate([labels == label for labels, label in zip(outputs, given, strict=True)])
    return _voting(estimator, _average_within(estimator, _one_hot(estimator, outputs), lonely))


@CONVERTERS.of("sklearn.neighbors", "RadiusNeighborsRegressor")
def radius_neighbors_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to averages of the targets within the radius."""
    targets = estimator._y.reshape(len(estimator._y), -1)
    with np.errstate(invalid="ignore"):
        lonely = np.full_like(targets[0], np.nan).astype(np.float64)  # of integers it is the least of them
    body = _average_within(estimator, targets.astype(np.float64), lonely)
    return body if isinstance(body, Unsupported) else Regressor(body, is_flat=estimator._y.ndim == 1)


@CONVERTERS.of("sklearn.neighbors", "LocalOutlierFactor")
def local_outlier_factor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert a detector of novelties."""
    if not estimator.novelty:
        return Unsupported("novelty=False, which answers for the rows of its fit alone; fit it with novelty=True")
    found = _distance(estimator)
    if isinstance(found, Unsupported):
        return found
    values = np.stack([estimator._distances_fit_X_[:, estimator.n_neighbors_ - 1], estimator._lrd], axis=1)
    nearby = NeighborAverage(raw(estimator._fit_X), values, k=estimator.n_neighbors_, by_distance=False, **found)
    answers = ("predict", "decision_function", "score_samples")
    body = OutlierFactor(nearby, offset=estimator.offset_)
    return OutlierDetector(body, includes_zero=True, answers=answers, offset=estimator.offset_)


@CONVERTERS.of("sklearn.semi_supervised", "LabelPropagation", "LabelSpreading")
def label_propagation(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to shares of the classes among the fitted rows, by the RBF kernel or by the nearest neighbours."""
    samples, shares = estimator.X_, np.asarray(estimator.label_distributions_, np.float64)
    body: nn.Module | None = None
    if estimator.kernel == "knn":
        k = int(estimator.nn_fit.n_neighbors)
        by_product = estimator.nn_fit._fit_method == "brute"
        body = NeighborAverage(samples, shares, k=k, p=2.0, scale=None, by_distance=False, by_product=by_product)
    elif estimator.kernel == "rbf":
        kernel = make_kernel(samples, "rbf", gamma=estimator.gamma)
        body = None if kernel is None else KernelProjection(kernel, shares)
    if body is None:
        name = getattr(estimator.kernel, "__name__", estimator.kernel)
        return Unsupported(f"kernel=the function {name}; fit it with 'rbf' or 'knn'")
    return Classifier(
        Shares(body), classes=class_labels(estimator.classes_), link="identity", answers=("predict", "predict_proba")
    )
