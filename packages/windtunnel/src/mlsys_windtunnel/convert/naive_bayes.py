"""Naive Bayes: joint log-likelihoods from Gaussians, counts, bits or codes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.kernel.gaussians import DiagonalGaussians
from mlsys_windtunnel.modules.linear.discriminant import Posterior
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.linear.naive_bayes import Binarize, CategoryLogLikelihood

CONVERTERS = Converters()

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
