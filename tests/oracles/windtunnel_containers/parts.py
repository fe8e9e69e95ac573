"""Parts of pipelines by what they hand on: producers, what changes the container, steps between, consumers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import make_column_transformer
from sklearn.ensemble import ExtraTreesRegressor, StackingRegressor, VotingRegressor
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest, VarianceThreshold, f_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.multioutput import RegressorChain
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MaxAbsScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    SplineTransformer,
    StandardScaler,
)

ROWS = 60
_DRAWN = np.random.default_rng(7)
NUMBERS = pd.DataFrame(
    {name: _DRAWN.integers(-2, 4, ROWS) * _DRAWN.choice([0.0, 0.5, 1.0], ROWS) for name in ("a", "b", "c")}
)
WORDS = ["red", "green", "blue", "grey", "pink"]
TABLE = NUMBERS.assign(
    k=_DRAWN.choice(WORDS, ROWS), t=[" ".join(_DRAWN.choice(WORDS, _DRAWN.integers(1, 5))) for _ in range(ROWS)]
)
TARGET = (NUMBERS.a * 2 + (TABLE.k == "red") * 3 + TABLE.t.str.count("blue") - NUMBERS.b).to_numpy()

Make = Callable[[], Any]


class Renamed(BaseEstimator, TransformerMixin):  # type: ignore[misc]
    """A step of a user's own that keeps nothing of its fit."""

    def fit(self, x: Any, y: Any = None) -> Renamed:
        """Return the step."""
        return self

    def transform(self, x: Any) -> Any:
        """Return a frame."""
        return x[["b", "a"]].rename(columns=str.upper)


def own(function: Callable[[Any], Any]) -> Make:
    """Return what makes a step of a user's own function."""
    return lambda: FunctionTransformer(function)


def text(x: Any) -> Any:
    """Return a Series of texts."""
    return x["t"]


def dicts(x: Any) -> Any:
    """Return rows as dictionaries in a list; a 0 in them is stored."""
    return x[["a", "k"]].to_dict("records")


def one_number(x: Any) -> Any:
    """Return a frame of one column."""
    return x[["a"]]


def stored(x: Any) -> Any:
    """Return a sparse table that stores each 0."""
    x = dense(x)
    rows, columns = np.indices(x.shape)
    return scipy.sparse.csr_matrix((x.ravel(), (rows.ravel(), columns.ravel())), x.shape)


def dense(x: Any) -> Any:
    """Return an array."""
    return x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)


def strictly_dense(x: Any) -> Any:
    """Return an array of what must be sparse."""
    return x.toarray()


def frame(x: Any) -> Any:
    """Return a frame."""
    return pd.DataFrame(dense(x)).add_prefix("f")


def of_columns(x: Any) -> Any:
    """Return a frame of what must be one, with a column more."""
    return x.assign(more=x[x.columns[0]] + 1)


def _mixed(threshold: float, **options: Any) -> Any:
    return make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", **options), ["k"]),
        ("passthrough", ["a", "b"]),
        sparse_threshold=threshold,
    )


PRODUCERS: dict[str, Make] = {
    "numbers": own(lambda x: x[["a", "b", "c"]]),
    "renamed": Renamed,
    "renamed beside others": lambda: make_column_transformer((Renamed(), ["a", "b"]), (OneHotEncoder(), ["k"])),
    "numbers, passed": lambda: make_column_transformer(("passthrough", ["a", "b", "c"])),
    "imputed": lambda: make_column_transformer((SimpleImputer(), ["a", "b"]), (StandardScaler(), ["c"])),
    "one-hot": lambda: make_column_transformer((OneHotEncoder(), ["k"])),
    "one-hot, dense": lambda: make_column_transformer((OneHotEncoder(sparse_output=False), ["k"])),
    "one-hot, made dense": lambda: make_column_transformer((OneHotEncoder(), ["k"]), sparse_threshold=0),
    "mixed, sparse": lambda: _mixed(1.0),
    "mixed, as it comes": lambda: _mixed(0.3),
    "mixed, dense": lambda: _mixed(0.0),
    "mixed, weighted": lambda: make_column_transformer((OneHotEncoder(), ["k"]), ("passthrough", ["a"])).set_params(
        transformer_weights={"onehotencoder": 0.0, "passthrough": 2.0}, sparse_threshold=1.0
    ),
    "mixed, frame": lambda: _mixed(0.0, sparse_output=False).set_output(transform="pandas"),
    "ordinals, frame": lambda: make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="most_frequent"), OrdinalEncoder()), ["k"]), remainder="drop"
    ).set_output(transform="pandas"),
    "bins": lambda: make_column_transformer((KBinsDiscretizer(3, quantile_method="linear"), ["a", "b"])),
    "splines": lambda: make_column_transformer((SplineTransformer(3, sparse_output=True), ["a", "b"])),
    "series, counts": lambda: make_pipeline(FunctionTransformer(text), CountVectorizer()),
    "column, tf-idf": lambda: make_column_transformer((TfidfVectorizer(), "t"), ("passthrough", ["a"])),
    "hashes": lambda: make_column_transformer((HashingVectorizer(n_features=4), "t")),
    "list, dictionaries": lambda: make_pipeline(FunctionTransformer(dicts), DictVectorizer()),
    "union": lambda: make_union(
        make_pipeline(FunctionTransformer(text), CountVectorizer(binary=True)),
        make_pipeline(FunctionTransformer(one_number), MaxAbsScaler()),
    ),
}
CONTAINERS: dict[str, Make | None] = {
    "as made": None,
    "array": own(dense),
    "of a sparse one": own(strictly_dense),
    "frame": own(frame),
    "frame, of columns": own(of_columns),
    "csr": own(lambda x: scipy.sparse.csr_matrix(dense(x))),
    "csc array": own(lambda x: scipy.sparse.csc_array(dense(x))),
    "csr, zeros stored": own(stored),
}
STEPS: dict[str, Make | None] = {
    "": None,
    "largest": MaxAbsScaler,
    "scaled": lambda: StandardScaler(with_mean=False),
    "standard": StandardScaler,
    "norms": Normalizer,
    "products": lambda: PolynomialFeatures(2, include_bias=False),
    "some": lambda: SelectKBest(f_regression, k=2),
    "varied": VarianceThreshold,
    "roots": lambda: FunctionTransformer(np.square),
    "filled": lambda: SimpleImputer(strategy="constant", fill_value=0),
    "vote": lambda: VotingRegressor([("r", Ridge()), ("s", Ridge(9))]),
}
CONSUMERS: dict[str, Make] = {
    "ridge": Ridge,
    "trees": lambda: ExtraTreesRegressor(3, max_depth=4, random_state=0),
    "neighbours": lambda: KNeighborsRegressor(3, algorithm="brute"),
    "function": lambda: make_pipeline(FunctionTransformer(dense), Ridge()),
    "stack": lambda: StackingRegressor(
        [("a", Ridge())], ExtraTreesRegressor(2, random_state=0), passthrough=True, cv=2
    ),
}
for _package, _name, _options in (
    ("xgboost", "XGBRegressor", {"n_estimators": 4, "max_depth": 3}),
    ("lightgbm", "LGBMRegressor", {"n_estimators": 4, "min_child_samples": 2, "verbose": -1}),
    ("catboost", "CatBoostRegressor", {"iterations": 3, "verbose": 0, "allow_writing_files": False}),
):
    if importlib.util.find_spec(_package):
        _make = getattr(importlib.import_module(_package), _name)
        CONSUMERS[_package] = lambda make=_make, options=_options: make(**options)
        if _package == "xgboost":
            _make_booster = CONSUMERS[_package]
            CONSUMERS |= {
                "xgboost, linear": lambda make=_make: make(booster="gblinear", n_estimators=4),
                "xgboost, -1 missing": lambda make=_make: make(n_estimators=4, missing=-1.0),
                "xgboost beside ridge": lambda make=_make_booster: VotingRegressor([("x", make()), ("r", Ridge())]),
                "xgboost in a stack": lambda make=_make_booster: StackingRegressor(
                    [("x", make()), ("r", Ridge())], Ridge(), cv=2
                ),
                "xgboost on a stack": lambda make=_make_booster: StackingRegressor(
                    [("r", Ridge())], make(), cv=2, passthrough=True
                ),
                "xgboost in a chain": lambda make=_make_booster: RegressorChain(make()),
            }
