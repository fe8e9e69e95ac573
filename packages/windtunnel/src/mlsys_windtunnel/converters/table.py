"""The table of built-in converters: one line per estimator class. The coverage page is made from it."""

from __future__ import annotations

from mlsys_windtunnel.converters.registry import Entry


def _family(module: str, package: str, functions: dict[str, str]) -> list[Entry]:
    """Lines for the classes of one package whose converters are in one file."""
    return [
        Entry(f"{package}.{cls}", f"mlsys_windtunnel.converters.{module}:{function}")
        for cls, function in functions.items()
    ]


ENTRIES: tuple[Entry, ...] = (
    *_family(
        "linear",
        "sklearn.linear_model",
        {
            "LinearRegression": "linear_regressor",
            "LogisticRegression": "logistic_regression",
        },
    ),
    *_family("scale", "sklearn.preprocessing", {"StandardScaler": "standard_scaler"}),
    *_family(
        "encode",
        "sklearn.preprocessing",
        {
            "OneHotEncoder": "one_hot_encoder",
            "OrdinalEncoder": "ordinal_encoder",
        },
    ),
)
