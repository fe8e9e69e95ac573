"""Partial least squares and canonical correlation analysis."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.kernel.decompose import Projection
from mlsys_windtunnel.modules.linear.latent import LatentRegressor

CONVERTERS = Converters()

LARGEST = 1e6  # standardised coefficient, beyond which rounding shows in the answers


@CONVERTERS.of("sklearn.cross_decomposition", "CCA", "PLSCanonical", "PLSRegression")
def latent_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert predictions and the scores of the features; those of targets (``transform(X, y)``) are not offered."""
    rotations = np.asarray(estimator.x_rotations_).T
    spread = np.abs(np.asarray(estimator.coef_) * estimator._x_std).max() / np.max(estimator._y_std)
    if spread > LARGEST:
        return Unsupported(
            f"n_components={estimator.n_components}, more than the rank of the features: what is beyond it is "
            "rounding; fit fewer"
        )
    return LatentRegressor(
        estimator._x_mean,
        estimator._x_std,
        estimator.coef_,
        estimator.intercept_,
        rotations,
        is_flat=bool(estimator._predict_1d),
    )


@CONVERTERS.of("sklearn.cross_decomposition", "PLSSVD")
def latent_projection(estimator: Any) -> OperatorModule:
    """Convert the scores of the features."""
    return Projection(estimator._x_mean, np.asarray(estimator.x_weights_).T / estimator._x_std)
