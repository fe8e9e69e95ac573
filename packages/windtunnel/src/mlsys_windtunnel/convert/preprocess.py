"""Numeric preprocessing that keeps no scale, imputers, and targets that were transformed before the fit.

Imputers fill missing cells in the network; flags of missing cells are the host's. ``KNNImputer`` and
``IterativeImputer`` are not here: fallbacks, as is a ``SimpleImputer`` of text or objects.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.convert.scale import inverse_of
from mlsys_windtunnel.host.lookup import MissingLookup, is_missing
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.columns.columns import Given, Impute, Select
from mlsys_windtunnel.modules.columns.preprocess import Binarize, BSplines, Elementwise, NormalizeRows, Products
from mlsys_windtunnel.parse.functions import known_functions, name_of_function, why_not_undone

CONVERTERS = Converters()
COMBINERS = Converters()


@CONVERTERS.of("sklearn.preprocessing", "Binarizer")
def binarizer(estimator: Any) -> OperatorModule:
    """Convert a threshold."""
    return Binarize(float(estimator.threshold))


@CONVERTERS.of("sklearn.preprocessing", "Normalizer")
def normalizer(estimator: Any) -> OperatorModule:
    """Convert a norm."""
    return NormalizeRows(estimator.norm)


@CONVERTERS.of("sklearn.preprocessing", "PolynomialFeatures")
def polynomial_features(estimator: Any) -> OperatorModule:
    """Convert; ``degree`` is the highest one, or the least and the highest."""
    degree: Any = estimator.degree
    least, highest = degree if np.iterable(degree) else (0, degree)
    return Products(
        estimator.n_features_in_,
        min_degree=int(least),
        max_degree=int(highest),
        interaction_only=estimator.interaction_only,
        include_bias=estimator.include_bias,
    )


@CONVERTERS.of("sklearn.preprocessing", "SplineTransformer")
def spline_transformer(estimator: Any) -> OperatorModule | Unsupported:
    """Convert splines; decline what a tensor cannot follow, and scikit-learn's mistakes.

    A tensor cannot raise (``extrapolation="error"``), and has no splines for coinciding knots.

    Mistakes as of 1.9: steps (degree 0) beyond the knots, which fail; the range of the second column and on for
    linear extrapolation of degree 1; missing values of the second column and on of a sparse output.
    """
    knots = np.stack([spline.t for spline in estimator.bsplines_])
    degree, extrapolation, has_many = estimator.degree, estimator.extrapolation, len(knots) > 1
    reads_missing = getattr(estimator, "handle_missing", "error") == "zeros"
    stays_inside = extrapolation in ("constant", "linear")
    if (
        extrapolation == "error"
        or not (np.diff(knots, axis=1) > 0).all()
        or (degree == 0 and stays_inside)
        or (degree == 1 and extrapolation == "linear" and has_many)
        or (reads_missing and estimator.sparse_output and not stays_inside and has_many)
    ):
        options = {name: getattr(estimator, name, None) for name in ("degree", "extrapolation", "handle_missing")}
        return Unsupported(
            f"{', '.join(f'{name}={value!r}' for name, value in options.items())} together, or knots that coincide; "
            "take degree 2 or more with extrapolation='constant' or 'continue'"
        )
    return BSplines(
        knots,
        degree=degree,
        extrapolation=extrapolation,
        include_bias=estimator.include_bias,
        is_zero_for_nan=reads_missing,
    )


@CONVERTERS.of("sklearn.preprocessing", "FunctionTransformer")
def function_transformer(estimator: Any) -> OperatorModule | Unsupported:
    """Convert functions of numpy and scipy that torch has too; decline any other, and any further arguments."""
    if estimator.func is None:
        return Elementwise("identity")
    if estimator.kw_args:
        return Unsupported(f"arguments of the function (kw_args={estimator.kw_args!r}); bind none")
    return _elementwise(estimator.func) or Unsupported(
        f"the function {getattr(estimator.func, '__name__', 'given')} (func); one of {', '.join(known_functions())} of "
        "numpy's or scipy.special's has a tensor form"
    )


@CONVERTERS.of("sklearn.compose", "TransformedTargetRegressor")
def declined_target(estimator: Any) -> Unsupported:
    """Say why the target's transformer cannot be undone; where it can, the regressor is an operator of its own."""
    return Unsupported(why_not_undone(estimator.transformer_) or "a target whose dimensions it does not keep")


@COMBINERS.of("sklearn.compose", "TransformedTargetRegressor")
def transformed_target_regressor(estimator: Any) -> OperatorModule:
    """Undo the target's transformation after the regressor's answer."""
    transformer = estimator.transformer_
    if not hasattr(transformer, "inverse_func"):
        back = inverse_of(transformer)
    elif transformer.inverse_func is None:
        back = Elementwise("identity")
    else:
        back = _elementwise(transformer.inverse_func)
    assert back is not None, "the graph has a join only where the inverse is known"
    return Regressor(back, is_flat=estimator._training_dim == 1)


def _elementwise(function: object) -> OperatorModule | None:
    name = name_of_function(function)
    return None if name is None else Elementwise(name)


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
