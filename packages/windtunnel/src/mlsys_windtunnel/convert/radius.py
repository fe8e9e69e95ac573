"""Neighbours within a radius, and local outlier factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.neighbors import (
    distance_of,
    is_by_product,
    one_hot,
    samples_of,
    voting,
    weighed_distance_of,
)
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import OperatorModule, OutlierDetector, Regressor
from mlsys_windtunnel.modules.kernel.neighbors import NeighborAverage
from mlsys_windtunnel.modules.kernel.radius import OutlierFactor, RadiusAverage

CONVERTERS = Converters()


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
    return voting(estimator, _average(estimator, one_hot(estimator, outputs), lonely))


@CONVERTERS.of("sklearn.neighbors", "RadiusNeighborsRegressor")
def radius_neighbors_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to averages of the targets within the radius."""
    targets = estimator._y.reshape(len(estimator._y), -1)
    with np.errstate(invalid="ignore"):
        lonely = np.full_like(targets[0], np.nan).astype(np.float64)  # of whole numbers it is the least of them
    body = _average(estimator, targets.astype(np.float64), lonely)
    return body if isinstance(body, Unsupported) else Regressor(body, is_flat=estimator._y.ndim == 1)


@CONVERTERS.of("sklearn.neighbors", "LocalOutlierFactor")
def local_outlier_factor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert a detector of novelties."""
    if not estimator.novelty:
        return Unsupported("novelty=False, which answers for the rows of its fit alone; fit it with novelty=True")
    found = distance_of(estimator, estimator.effective_metric_)
    if isinstance(found, Unsupported):
        return found
    p, scale, distance = found
    nearby = NeighborAverage(
        samples_of(estimator),
        np.stack([estimator._distances_fit_X_[:, estimator.n_neighbors_ - 1], estimator._lrd], axis=1),
        k=estimator.n_neighbors_,
        p=p,
        scale=scale,
        by_distance=False,
        by_product=is_by_product(estimator, p),
        distance=distance,
    )
    answers = ("predict", "decision_function", "score_samples")
    body = OutlierFactor(nearby, offset=estimator.offset_)
    return OutlierDetector(body, includes_zero=True, answers=answers, offset=estimator.offset_)


def _average(
    estimator: Any, values: npt.NDArray[np.float64], lonely: npt.NDArray[Any] | None
) -> RadiusAverage | Unsupported:
    if estimator.radius is None:
        return Unsupported("radius=None, by which the source answers nothing; set a number")
    found = weighed_distance_of(estimator)
    if isinstance(found, Unsupported):
        return found
    p, scale, distance = found
    return RadiusAverage(
        samples_of(estimator),
        values,
        lonely=lonely,
        radius=estimator.radius,
        p=p,
        scale=scale,
        by_distance=estimator.weights == "distance",
        by_product=is_by_product(estimator, p),
        distance=distance,
    )
