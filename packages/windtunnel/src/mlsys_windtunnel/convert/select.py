"""Feature selectors: whatever chose the columns, the choice is all that a transformation needs."""

from __future__ import annotations

from typing import Any

from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.columns.columns import Select

CONVERTERS = Converters()


@CONVERTERS.of(
    "sklearn.feature_selection",
    "GenericUnivariateSelect",
    "RFE",
    "RFECV",
    "SelectFdr",
    "SelectFpr",
    "SelectFromModel",
    "SelectFwe",
    "SelectKBest",
    "SelectPercentile",
    "SequentialFeatureSelector",
    "VarianceThreshold",
)
def selector(estimator: Any) -> OperatorModule:
    """Convert any selector with ``get_support``."""
    return Select(estimator.get_support(indices=True).tolist())
