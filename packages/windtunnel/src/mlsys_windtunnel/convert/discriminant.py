"""Linear and quadratic discriminant analysis, and covariance estimators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlsys_windtunnel.convert.linear import OUTLIERS, PROBABILISTIC, affine, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, OutlierDetector
from mlsys_windtunnel.modules.kernel.decompose import Projection
from mlsys_windtunnel.modules.kernel.gaussians import FullGaussians, Nearness
from mlsys_windtunnel.modules.linear.discriminant import LinearDiscriminant, Posterior

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.discriminant_analysis", "LinearDiscriminantAnalysis")
def linear_discriminant_analysis(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to margins with a logistic or softmax link; the ``lsqr`` solver has no transform."""
    num_classes = len(estimator.classes_)
    if num_classes < 2:  # the source's own methods fail there
        return Unsupported("a fit on one class; fit it on two or more")
    head = Classifier(
        affine(estimator),
        classes=class_labels(estimator.classes_),
        link="logistic" if num_classes == 2 else "softmax",
        answers=PROBABILISTIC,
    )
    projection = None
    if estimator.solver != "lsqr":
        mean = estimator.xbar_ if estimator.solver == "svd" else np.zeros(estimator.n_features_in_)
        projection = Projection(mean, estimator.scalings_[:, : estimator._max_components].T)
    return LinearDiscriminant(head, projection=projection)


@CONVERTERS.of("sklearn.discriminant_analysis", "QuadraticDiscriminantAnalysis")
def quadratic_discriminant_analysis(estimator: Any) -> OperatorModule:
    """Convert to a Gaussian for each class (Hastie et al., Elements of Statistical Learning, equation 4.12)."""
    width = max(rotation.shape[1] for rotation in estimator.rotations_)
    directions = [np.pad(rotation, ((0, 0), (0, width - rotation.shape[1]))) for rotation in estimator.rotations_]
    log_scales = [-0.5 * np.pad(np.log(scaling), (0, width - len(scaling))) for scaling in estimator.scalings_]
    constant = 0.5 * estimator.n_features_in_ * math.log(2 * math.pi)  # which the source leaves out
    body = FullGaussians(estimator.means_, directions, log_scales, np.log(estimator.priors_) + constant)
    return Posterior(body, classes=class_labels(estimator.classes_), answers=PROBABILISTIC)


@CONVERTERS.of("sklearn.covariance", "EllipticEnvelope")
def elliptic_envelope(estimator: Any) -> OperatorModule:
    """Convert; inliers are the rows at or below the distance of the fitted quantile."""
    offset = float(estimator.offset_)
    body = Nearness(estimator.location_, estimator.get_precision(), offset)
    return OutlierDetector(body, includes_zero=True, answers=OUTLIERS, offset=offset)
