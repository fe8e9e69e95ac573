"""Classifiers by joint log-likelihoods (discriminant analysis, naive Bayes), and covariance estimators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

from mlsys_windtunnel.convert.linear import OUTLIERS, PROBABILISTIC, affine, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, OutlierDetector
from mlsys_windtunnel.modules.kernel.decompose import Projection
from mlsys_windtunnel.modules.linear.discriminant import (
    Binarize,
    CategoryLogLikelihood,
    DiagonalGaussians,
    FullGaussians,
    LinearDiscriminant,
    Nearness,
    Posterior,
)
from mlsys_windtunnel.modules.linear.linear import Affine

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


ANSWERS = ("predict", "predict_proba", "predict_log_proba")


@CONVERTERS.of("sklearn.naive_bayes", "GaussianNB")
def gaussian_nb(estimator: Any) -> OperatorModule:
    """Convert to a Gaussian with independent features for each class."""
    with np.errstate(divide="ignore"):  # a prior, and a variance, may be 0
        scales, log_priors = 1 / np.sqrt(estimator.var_), np.log(estimator.class_prior_)
    return _posterior(estimator, DiagonalGaussians(estimator.theta_, scales, log_priors))


@CONVERTERS.of("sklearn.naive_bayes", "MultinomialNB")
def multinomial_nb(estimator: Any) -> OperatorModule:
    """Convert to an affine map of the counts."""
    return _posterior(estimator, Affine(estimator.feature_log_prob_, estimator.class_log_prior_))


@CONVERTERS.of("sklearn.naive_bayes", "ComplementNB")
def complement_nb(estimator: Any) -> OperatorModule:
    """Convert to an affine map of the counts; the prior counts only where there is one class."""
    bias = estimator.class_log_prior_ if len(estimator.classes_) == 1 else 0.0
    return _posterior(estimator, Affine(estimator.feature_log_prob_, bias))


@CONVERTERS.of("sklearn.naive_bayes", "BernoulliNB")
def bernoulli_nb(estimator: Any) -> OperatorModule:
    """Convert to an affine map of the bits."""
    with np.errstate(divide="ignore", invalid="ignore"):  # as the source, where a feature is certain
        negative = np.log(1 - np.exp(estimator.feature_log_prob_))
        body = Affine(estimator.feature_log_prob_ - negative, estimator.class_log_prior_ + negative.sum(axis=1))
    if estimator.binarize is None:
        return _posterior(estimator, body)
    return _posterior(estimator, nn.Sequential(Binarize(float(estimator.binarize)), body))


@CONVERTERS.of("sklearn.naive_bayes", "CategoricalNB")
def categorical_nb(estimator: Any) -> OperatorModule:
    """Convert to a look-up of each feature's code."""
    return _posterior(estimator, CategoryLogLikelihood(estimator.feature_log_prob_, estimator.class_log_prior_))


def _posterior(estimator: Any, body: nn.Module) -> OperatorModule:
    return Posterior(body, classes=class_labels(estimator.classes_), answers=ANSWERS)
