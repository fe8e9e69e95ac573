"""Those of the pipelines that read reviews, and bicycles by the hour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from lightgbm import LGBMClassifier
from sklearn.compose import (
    ColumnTransformer,
    make_column_transformer,
)
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
)
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfTransformer, TfidfVectorizer
from sklearn.feature_selection import RFE, SelectPercentile, chi2
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import PoissonRegressor, RidgeCV, SGDClassifier
from sklearn.naive_bayes import ComplementNB
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    SplineTransformer,
    StandardScaler,
)
from sklearn.svm import LinearSVC

from tests.oracles.windtunnel_notebooks.parts import (
    FEW,
    QUIET,
    SEED,
    TextStats,
    cosine,
    first,
    sine,
)

Build = Callable[[], tuple[Any, str, list[str] | None]]
CASES: dict[str, Build] = {
    "text": lambda: (
        Pipeline([("vect", CountVectorizer()), ("tfidf", TfidfTransformer()), ("clf", SGDClassifier(**SEED))]),
        "reviews",
        ["text"],
    ),
    "topics": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), TruncatedSVD(6, **SEED), Normalizer()), "text"),
                (OneHotEncoder(), ["product"]),
            ),
            LGBMClassifier(**QUIET),
        ),
        "reviews",
        None,
    ),
    "words and letters": lambda: (
        make_pipeline(
            FunctionTransformer(first),
            FeatureUnion(
                [
                    ("word", TfidfVectorizer(sublinear_tf=True, stop_words="english")),
                    ("char", TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), max_features=200)),
                    ("stats", make_pipeline(TextStats(), MaxAbsScaler())),
                ]
            ),
            LinearSVC(**SEED),
        ),
        "reviews",
        ["text"],
    ),
    "title, text and numbers": lambda: (
        make_pipeline(
            ColumnTransformer(
                [
                    ("title", CountVectorizer(), "title"),
                    ("text", make_pipeline(TfidfVectorizer(min_df=2), SelectPercentile(chi2, percentile=60)), "text"),
                    ("num", MinMaxScaler(clip=True), ["helpful"]),
                    ("cat", OneHotEncoder(handle_unknown="ignore"), ["product"]),
                ]
            ),
            ComplementNB(),
        ),
        "reviews",
        None,
    ),
    "hashed words": lambda: (
        make_pipeline(
            make_column_transformer((HashingVectorizer(n_features=64), "text")),
            SGDClassifier(loss="log_loss", **SEED),
        ),
        "reviews",
        None,
    ),
    "hours as waves": lambda: (
        make_pipeline(
            ColumnTransformer(
                [
                    ("cat", OneHotEncoder(handle_unknown="ignore"), ["season", "weather"]),
                    ("month_sin", sine(12), ["month"]),
                    ("month_cos", cosine(12), ["month"]),
                    ("hour_sin", sine(24), ["hour"]),
                    ("hour_cos", cosine(24), ["hour"]),
                ],
                remainder=MinMaxScaler(),
            ),
            RidgeCV(alphas=np.logspace(-6, 6, 5)),
        ),
        "bicycles",
        None,
    ),
    "hours as splines": lambda: (
        make_pipeline(
            ColumnTransformer(
                [
                    ("cat", OneHotEncoder(handle_unknown="ignore"), ["season", "weather"]),
                    (
                        "hour",
                        SplineTransformer(
                            n_knots=7, knots=np.linspace(0, 24, 7).reshape(7, 1), extrapolation="periodic"
                        ),
                        ["hour"],
                    ),
                ],
                remainder=MinMaxScaler(),
            ),
            Nystroem(kernel="poly", degree=2, n_components=30, **SEED),
            PoissonRegressor(alpha=1e-3, max_iter=300),
        ),
        "bicycles",
        None,
    ),
    "histogram of counts": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("cat", OrdinalEncoder(categories=[["clear", "misty", "rain", "heavy_rain"]]), ["weather"])],
                remainder="passthrough",
                verbose_feature_names_out=False,
            ).set_output(transform="pandas"),
            HistGradientBoostingRegressor(loss="poisson", max_iter=5, categorical_features=["season"]),
        ),
        "bicycles",
        None,
    ),
    "eliminated one by one": lambda: (
        make_pipeline(
            make_column_transformer(
                (OneHotEncoder(sparse_output=False, drop="first"), ["season"]),
                ("passthrough", ["temp", "humidity", "holiday"]),
                remainder="drop",
            ),
            StandardScaler(),
            RFE(RidgeCV(), n_features_to_select=4),
            GradientBoostingRegressor(loss="huber", **FEW),
        ),
        "bicycles",
        None,
    ),
}
