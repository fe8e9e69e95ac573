"""A table of mixed columns, targets, and the parts that pipelines on it share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier
from sklearn.compose import (
    ColumnTransformer,
    make_column_transformer,
)
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    OneHotEncoder,
    StandardScaler,
)

ROWS = 160
RNG = np.random.default_rng(7)
WORDS = ["late", "early", "rain", "snow", "sunny", "storm", "delay", "gate", "plane", "crew", "fuel", "wing"]


def make_table() -> pd.DataFrame:
    """Return the table: each kind of column that people have, some cells missing."""
    age = RNG.normal(40, 12, ROWS).round(1)
    age[::9] = np.nan
    city = RNG.choice(np.array(["Oslo", "Bern", "Rome", "Kyōto"], object), ROWS)
    city[::11] = None
    table = pd.DataFrame(
        {
            "age": age,
            "visits": RNG.poisson(3, ROWS),
            "price": RNG.lognormal(2, 1, ROWS).round(2),
            "city": pd.Series(city, dtype=object),
            "size": pd.Categorical(RNG.choice(["S", "M", "L"], ROWS), ["S", "M", "L"], ordered=True),
            "is_member": RNG.random(ROWS) < 0.4,
            "note": [" ".join(RNG.choice(WORDS, 4)) for _ in range(ROWS)],
            "grade": pd.array(RNG.integers(1, 6, ROWS), dtype="Int64"),
            "score": pd.array(RNG.normal(size=ROWS).round(3), dtype="Float64"),
            "code": pd.Series(RNG.choice(["x1", "x2", "x3"], ROWS), dtype="string"),
            "since": pd.Timestamp("2024-01-01") + pd.to_timedelta(RNG.integers(0, 900, ROWS), unit="D"),
        }
    )
    table.loc[::13, "grade"] = pd.NA
    return table


TABLE = make_table()
_STRENGTH = TABLE.price.rank(pct=True) + 0.4 * (TABLE.city == "Oslo") + 0.3 * TABLE.is_member + RNG.normal(0, 0.3, ROWS)
YES_NO = np.where(_STRENGTH > 0.8, "yes", "no")
THREE = pd.Series(pd.cut(_STRENGTH, 3, labels=["low", "mid", "top"]).astype(object))
NUMBER = (10 * _STRENGTH).to_numpy(float)
PAIR = np.stack([NUMBER, TABLE.price.to_numpy()], axis=1)

NUMBERS, WORDY = ["age", "visits", "price"], ["city", "size"]
KNOWN = {"handle_unknown": "ignore"}


def log_price(x: Any) -> Any:
    """Return the logarithm."""
    return np.log1p(x)


def days(frame: pd.DataFrame) -> Any:
    """Return days since 2024."""
    return pd.DataFrame({"days": (pd.to_datetime(frame["since"]) - pd.Timestamp("2024-01-01")).dt.days})


def with_ratio(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with a column more."""
    return frame.assign(ratio=frame["price"] / (1 + frame["visits"]))


def numbers() -> Any:
    """Return steps for numbers."""
    return make_pipeline(SimpleImputer(strategy="median"), StandardScaler())


def words(**options: Any) -> Any:
    """Return steps for words."""
    return make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(**KNOWN, **options))


def mixed(*more: Any, **options: Any) -> ColumnTransformer:
    """Return steps for both."""
    return make_column_transformer((numbers(), NUMBERS), (words(), WORDY), *more, **options)


def trees(**options: Any) -> LGBMClassifier:
    """Return a small LightGBM."""
    return LGBMClassifier(n_estimators=4, min_child_samples=5, verbose=-1, n_jobs=1, **options)


def in_pandas(*steps: Any) -> Pipeline:
    """Return a pipeline whose steps hand frames on."""
    return make_pipeline(*steps).set_output(transform="pandas")


DENSE = {"sparse_output": False}
Build = Callable[[], tuple[Any, list[str] | None, Any]]  # an unfitted pipeline, its columns (None: all), its target


def mixed_dense() -> ColumnTransformer:
    """Return steps for both, in named columns."""
    return ColumnTransformer(
        [("n", numbers(), NUMBERS), ("w", words(**DENSE), WORDY)], verbose_feature_names_out=False, sparse_threshold=0
    )
