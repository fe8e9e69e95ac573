"""Outliers by their distance from a robust estimate of mean and covariance."""

from __future__ import annotations

from typing import Any

from mlsys_windtunnel.convert.linear import OUTLIERS
from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule, OutlierDetector
from mlsys_windtunnel.modules.kernel.gaussians import Nearness

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.covariance", "EllipticEnvelope")
def elliptic_envelope(estimator: Any) -> OperatorModule:
    """Convert; inliers are the rows at or below the distance of the fitted quantile."""
    offset = float(estimator.offset_)
    body = Nearness(estimator.location_, estimator.get_precision(), offset)
    return OutlierDetector(body, includes_zero=True, answers=OUTLIERS, offset=offset)
