"""Kernel ridge regression and the mean of Gaussian process regression."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from mlsys_windtunnel.convert.decompose import declined_kernel, make_kernel
from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.kernel.covariance import (
    Combined,
    ConstantCovariance,
    LaplaceClassifier,
    PosteriorMean,
    Powered,
    Shape,
    Stationary,
)
from mlsys_windtunnel.modules.kernel.decompose import KernelProjection
from mlsys_windtunnel.modules.linear.linear import Affine

CONVERTERS = Converters()

_DECLINED_KERNEL = (
    "kernel={}: of scikit-learn's, Constant, White, RBF, Matern with nu 0.5, 1.5, 2.5 or infinite, "
    "RationalQuadratic, ExpSineSquared and DotProduct are known, with their sums, products and powers"
)
MATERN: dict[float, Shape] = {0.5: "matern-1/2", 1.5: "matern-3/2", 2.5: "matern-5/2", np.inf: "rbf"}


@CONVERTERS.of("sklearn.kernel_ridge", "KernelRidge")
def kernel_ridge(estimator: Any) -> OperatorModule | Unsupported:
    """Convert kernels by name, and a precomputed one to an affine map of its values; functions decline."""
    weights = np.asarray(estimator.dual_coef_)
    if estimator.kernel == "precomputed":
        return Regressor(Affine(weights.reshape(len(weights), -1).T, 0.0), is_flat=weights.ndim == 1)
    parameters = {"gamma": estimator.gamma, "degree": estimator.degree, "coef0": estimator.coef0}
    kernel = make_kernel(estimator.X_fit_, estimator.kernel, **parameters)
    if kernel is None:
        return Unsupported(declined_kernel(estimator.kernel))
    return Regressor(KernelProjection(kernel, weights.reshape(len(weights), -1)), is_flat=weights.ndim == 1)


@CONVERTERS.of("sklearn.gaussian_process", "GaussianProcessRegressor")
def gaussian_process_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert ``predict`` without ``return_std``. Kernels that are not known here decline."""
    covariance = _covariance(estimator.kernel_)
    if covariance is None:
        return Unsupported(_DECLINED_KERNEL.format(estimator.kernel_))
    weights = np.asarray(estimator.alpha_).reshape(len(estimator.X_train_), -1)
    mean = PosteriorMean(
        covariance, estimator.X_train_, weights, mean=estimator._y_train_mean, scale=estimator._y_train_std
    )
    return Regressor(mean)


@CONVERTERS.of("sklearn.gaussian_process", "_BinaryGaussianProcessClassifierLaplace")
def laplace_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert a classifier of two classes; of more, each pair or class has one. Kernels not known here decline."""
    from sklearn.gaussian_process import _gpc

    covariance = _covariance(estimator.kernel_)
    if covariance is None:
        return Unsupported(_DECLINED_KERNEL.format(estimator.kernel_))
    factor = np.linalg.inv(estimator.L_)
    return LaplaceClassifier(
        covariance,
        estimator.X_train_,
        weights=estimator.y_train_ - estimator.pi_,
        roots=estimator.W_sr_,
        factor=factor,
        rates=np.ravel(_gpc.LAMBDAS),
        coefficients=np.ravel(_gpc.COEFS),
        classes=class_labels(estimator.classes_),
    )


def _covariance(kernel: Any) -> nn.Module | None:
    """Convert a kernel by its exact class, since a subclass may compute something else."""
    name = type(kernel).__name__ if type(kernel).__module__ == "sklearn.gaussian_process.kernels" else None
    if name in ("Sum", "Product"):
        first, second = _covariance(kernel.k1), _covariance(kernel.k2)
        return None if first is None or second is None else Combined(first, second, multiplies=name == "Product")
    if name == "Exponentiation":
        base = _covariance(kernel.kernel)
        return None if base is None else Powered(base, kernel.exponent)
    if name == "ConstantKernel":
        return ConstantCovariance(kernel.constant_value)
    if name == "WhiteKernel":
        return ConstantCovariance(0.0, noise=kernel.noise_level)
    if name == "RBF":
        return Stationary("rbf", kernel.length_scale)
    if name == "Matern" and kernel.nu in MATERN:
        return Stationary(MATERN[kernel.nu], kernel.length_scale)
    if name == "RationalQuadratic":
        return Stationary("rational-quadratic", kernel.length_scale, extra=kernel.alpha)
    if name == "ExpSineSquared":
        return Stationary("periodic", kernel.length_scale, extra=kernel.periodicity)
    if name == "DotProduct":
        return Stationary("dot-product", kernel.sigma_0)
    return None
