"""Register the converters of CatBoost's models with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import ConverterSpec

_CONVERTERS = {
    "CatBoost": "catboost_values",
    "CatBoostClassifier": "catboost_classifier",
    "CatBoostRanker": "catboost_values",
    "CatBoostRegressor": "catboost_regressor",
}


@hookimpl
def mlsys_register_converters() -> Iterable[ConverterSpec]:
    """Return a converter for each of CatBoost's estimators, and how all of them take tables."""
    return [
        ConverterSpec(
            name=name.lower(),
            help="CatBoost's trees, with its hashes and statistics of categories.",
            source=f"catboost.core:{name}",
            factory=f"mlsys_windtunnel_catboost.convert:{converter}",
            library="mlsys_windtunnel_catboost.library:CATBOOST",
        )
        for name, converter in _CONVERTERS.items()
    ]
