"""Imputers: values for missing cells in the network, flags of missing cells on the host.

``KNNImputer`` and ``IterativeImputer`` are not here: fallbacks, as is a ``SimpleImputer`` of text or objects.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.host.lookup import MissingLookup, is_missing
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.columns.columns import Given, Impute

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.impute", "SimpleImputer")
def simple_imputer(estimator: Any) -> OperatorModule | Unsupported:
    """Convert any strategy, on numbers."""
    marker = estimator.missing_values
    if estimator._fit_dtype.kind == "O" or not (isinstance(marker, Real) or is_missing(marker)):
        return Unsupported("columns of text or other objects, which it answers as such")
    if is_missing(marker):  # pandas' NA becomes NaN with the rest of its frame
        marker = np.nan
    elif estimator._fit_dtype == np.float32:  # the source compares in the values' precision
        marker = float(np.float32(marker))
    statistics = estimator.statistics_
    has_none = np.array([is_missing(value) for value in statistics.tolist()])
    kept = np.flatnonzero(~has_none | estimator.keep_empty_features)
    return Impute(
        statistics[kept].astype(estimator._fill_dtype),
        kept.tolist(),
        marker=float(marker),
        indicated=estimator.indicator_.features_.tolist() if estimator.add_indicator else (),
    )


@CONVERTERS.of("sklearn.impute", "MissingIndicator")
def missing_indicator(estimator: Any) -> Converted | Unsupported:
    """Convert to a look-up on the host: columns may be text, and the source may refuse new missing values."""
    marker = estimator.missing_values
    if is_missing(marker) and not isinstance(marker, Real):  # pandas' NA, which takes None for missing as well
        return Unsupported(f"missing_values={marker!r}, which takes None for missing as well; fit it with np.nan")
    lookup = MissingLookup(
        marker,
        estimator.features_.tolist(),
        refuses_new=estimator.features == "missing-only" and estimator.error_on_new,
        names=[str(name) for name in getattr(estimator, "feature_names_in_", range(estimator.n_features_in_))],
    )
    return Converted(Given(), lookup, num_codes=len(estimator.features_))
