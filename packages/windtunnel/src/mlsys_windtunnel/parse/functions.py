"""Functions of a column that have a tensor form, and transformers of targets that can be undone."""

from __future__ import annotations

from functools import cache
from typing import Any

from mlsys_windtunnel.parse.names import known_name

_INVERTIBLE = frozenset(
    f"sklearn.preprocessing.{name}"
    for name in (
        "MaxAbsScaler",
        "MinMaxScaler",
        "PowerTransformer",
        "QuantileTransformer",
        "RobustScaler",
        "StandardScaler",
    )
)


@cache
def _names() -> dict[Any, str]:
    import numpy as np
    from scipy import special  # type: ignore[import-untyped]

    return {
        np.abs: "abs",
        np.exp: "exp",
        np.exp2: "exp2",
        np.expm1: "expm1",
        np.log: "log",
        np.log10: "log10",
        np.log1p: "log1p",
        np.log2: "log2",
        np.positive: "identity",
        np.sinh: "sinh",
        np.arcsinh: "asinh",
        np.sqrt: "sqrt",
        np.square: "square",
        np.tanh: "tanh",
        special.expit: "sigmoid",
        special.expm1: "expm1",
        special.log1p: "log1p",
        special.logit: "logit",
    }


def name_of_function(function: Any) -> str | None:
    """Return the tensor form's name of a function; None if there is none.

    A function is known by identity: another one of the same name may compute something else.
    """
    return next((name for known, name in _names().items() if known is function), None)


def known_functions() -> list[str]:
    """Return names of the functions that have a tensor form, sorted."""
    return sorted(set(_names().values()))


def quantiles_are_usable(estimator: Any) -> bool:
    """Return whether quantiles can be interpolated: one alone has no slope, and a column without numbers has none."""
    import numpy as np

    quantiles = estimator.quantiles_
    return not estimator.ignore_implicit_zeros and len(quantiles) > 1 and bool(np.isfinite(quantiles).all())


def why_not_undone(transformer: Any) -> str | None:
    """Return why a fitted transformer of targets has no tensor form of its inverse, in words; None if it has one."""
    known = f"{', '.join(sorted(name.rpartition('.')[2] for name in _INVERTIBLE))}"
    if hasattr(transformer, "inverse_func"):
        function = transformer.inverse_func
        if transformer.inv_kw_args:
            return f"inv_kw_args={transformer.inv_kw_args!r}: further arguments are not translated; bind none"
        if function is not None and name_of_function(function) is None:
            return (
                f"inverse_func={getattr(function, '__name__', function)!s}: a function of your own has no tensor form; "
                f"give one of numpy's or scipy.special's: {', '.join(known_functions())}"
            )
        return None
    name = known_name(type(transformer))
    if name not in _INVERTIBLE:
        return f"transformer={type(transformer).__name__}: its inverse is not translated; {known} are"
    if name.endswith("QuantileTransformer") and not quantiles_are_usable(transformer):
        return "transformer=QuantileTransformer: it has one quantile, or ignore_implicit_zeros; fit it without"
    return None
