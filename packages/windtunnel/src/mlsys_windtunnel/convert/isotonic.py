"""Isotonic regression: interpolation between thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.combine.calibrate import Isotonic

CONVERTERS = Converters()


def isotonic(estimator: Any) -> Isotonic:
    """Convert the function alone, for calibrators. Where the source raises out of bounds, the module answers NaN."""
    return Isotonic(
        estimator.X_thresholds_,
        estimator.y_thresholds_,
        outside="clip" if estimator.out_of_bounds == "clip" else "nan",
        rounds=estimator.X_thresholds_.dtype == np.float32,
    )


def _bounds(estimator: Any) -> tuple[float | None, float | None]:
    return (float(estimator.X_min_), float(estimator.X_max_)) if estimator.out_of_bounds == "raise" else (None, None)


@CONVERTERS.of("sklearn.isotonic", "IsotonicRegression", bounds=_bounds)
def isotonic_regression(estimator: Any) -> OperatorModule:
    """Convert a regressor of one feature."""
    return Regressor(isotonic(estimator))
