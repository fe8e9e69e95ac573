"""Forty pipelines as notebooks and scikit-learn's gallery have them, each on its table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import (
    ColumnTransformer,
    TransformedTargetRegressor,
    make_column_selector,
    make_column_transformer,
)
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
)
from sklearn.feature_selection import SelectFromModel, SelectKBest, f_regression
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.linear_model import ElasticNetCV, Lasso, LogisticRegression, RidgeCV
from sklearn.linear_model import LogisticRegressionCV as LogisticCV
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, TunedThresholdClassifierCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC, LinearSVC

from tests.oracles.windtunnel_notebooks import texts
from tests.oracles.windtunnel_notebooks.parts import (
    AREAS,
    CLASSES,
    FEW,
    PLACES,
    QUALITY,
    QUIET,
    SEED,
    SIZES,
    UNKNOWN,
    Columns,
    Family,
    age_of_house,
    boosted,
    coded,
    deck,
    houses,
    passengers,
    scaled,
    sold,
    title,
    to_number,
)
from tests.oracles.windtunnel_notebooks.tables import FITTED, TABLES

# An unfitted pipeline, its table, and that table's columns (None: all).
CASES: dict[str, Callable[[], tuple[Any, str, list[str] | None]]] = {
    "logistic": lambda: (
        Pipeline([("prep", passengers()), ("clf", LogisticRegression(max_iter=500))]),
        "passengers",
        None,
    ),
    "title": lambda: (
        make_pipeline(
            passengers(("title", make_pipeline(FunctionTransformer(title), coded()), ["Name"])),
            RandomForestClassifier(max_depth=5, **FEW),
        ),
        "passengers",
        None,
    ),
    "family": lambda: (
        make_pipeline(
            Family(),
            ColumnTransformer([("num", scaled(), [*SIZES, "FamilySize", "IsAlone"]), ("cat", coded(), CLASSES)]),
            LogisticRegression(),
        ),
        "passengers",
        None,
    ),
    "deck": lambda: (
        make_pipeline(
            passengers(("deck", make_pipeline(FunctionTransformer(deck), coded()), ["Cabin"]), remainder="drop"),
            boosted(),
        ),
        "passengers",
        None,
    ),
    "old style": lambda: (
        make_pipeline(
            FeatureUnion(
                [
                    ("num", make_pipeline(Columns(SIZES), scaled())),
                    ("cat", make_pipeline(Columns(CLASSES), coded())),
                ]
            ),
            KNeighborsClassifier(7),
        ),
        "passengers",
        None,
    ),
    "histogram, ordinals": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("cat", OrdinalEncoder(**UNKNOWN, encoded_missing_value=-2), CLASSES)],
                remainder="passthrough",
                verbose_feature_names_out=False,
            ),
            HistGradientBoostingClassifier(max_iter=5, categorical_features=[1, 2]),
        ),
        "passengers",
        [*SIZES, *CLASSES],
    ),
    "svc": lambda: (
        make_pipeline(passengers(sparse_threshold=0), PCA(0.9), SVC(probability=False)),
        "passengers",
        None,
    ),
    "neighbours fill": lambda: (
        make_pipeline(KNNImputer(n_neighbors=3), MinMaxScaler(), KNeighborsClassifier(5, weights="distance")),
        "passengers",
        [*SIZES, "Pclass"],
    ),
    "voting": lambda: (
        make_pipeline(
            passengers(),
            VotingClassifier(
                [
                    ("lr", LogisticRegression()),
                    ("rf", RandomForestClassifier(max_depth=4, **FEW)),
                    ("lgbm", LGBMClassifier(**QUIET)),
                ],
                voting="soft",
                weights=[1, 2, 1],
            ),
        ),
        "passengers",
        None,
    ),
    "stacking": lambda: (
        StackingClassifier(
            [
                ("rf", make_pipeline(passengers(), RandomForestClassifier(max_depth=4, **FEW))),
                ("svc", make_pipeline(passengers(), LinearSVC(**SEED))),
            ],
            final_estimator=LogisticRegression(),
            cv=3,
        ),
        "passengers",
        None,
    ),
    "grid": lambda: (
        GridSearchCV(
            Pipeline([("prep", passengers()), ("clf", RandomForestClassifier(**FEW))]),
            {"prep__num__imputer__strategy": ["mean", "median"], "clf__max_depth": [3, 5]},
            cv=2,
        ),
        "passengers",
        None,
    ),
    "calibrated": lambda: (
        CalibratedClassifierCV(make_pipeline(passengers(), SVC()), method="sigmoid", cv=2),
        "passengers",
        None,
    ),
    "indicator": lambda: (
        make_pipeline(
            make_column_transformer(
                (SimpleImputer(add_indicator=True), SIZES),
                (make_pipeline(SimpleImputer(strategy="constant", fill_value="missing"), OneHotEncoder()), ["Sex"]),
            ),
            RandomForestClassifier(max_depth=5, **FEW),
        ),
        "passengers",
        None,
    ),
    "threshold": lambda: (
        TunedThresholdClassifierCV(make_pipeline(passengers(), LogisticCV(cv=2, max_iter=300)), cv=2, **SEED),
        "passengers",
        None,
    ),
    "log of the price": lambda: (
        TransformedTargetRegressor(
            make_pipeline(houses(), RobustScaler(with_centering=False), Lasso(0.001, max_iter=5000)),
            func=np.log1p,
            inverse_func=np.expm1,
        ),
        "houses",
        None,
    ),
    "polynomials chosen": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_pipeline(scaled(), PolynomialFeatures(2, include_bias=False)), AREAS), (coded(), PLACES)
            ),
            SelectKBest(f_regression, k=12),
            RidgeCV(),
        ),
        "houses",
        None,
    ),
    "quality in order": lambda: (
        make_pipeline(houses(("q", QUALITY, ["ExterQual"])), GradientBoostingRegressor(**FEW)),
        "houses",
        None,
    ),
    "dates": lambda: (
        make_pipeline(houses(("date", FunctionTransformer(sold), ["Sold"])), HistGradientBoostingRegressor(max_iter=5)),
        "houses",
        None,
    ),
    "age of the house": lambda: (
        make_pipeline(
            FunctionTransformer(age_of_house),
            make_column_transformer(
                (scaled(), make_column_selector(dtype_include=np.number)),
                (coded(), make_column_selector(dtype_exclude=np.number)),
            ),
            LGBMRegressor(**QUIET),
        ),
        "houses",
        None,
    ),
    "frames by name": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("num", SimpleImputer(), AREAS), ("cat", "passthrough", PLACES)], verbose_feature_names_out=False
            ),
            ColumnTransformer(
                [("scale", StandardScaler(), AREAS), ("cat", OneHotEncoder(sparse_output=False), PLACES)],
                verbose_feature_names_out=False,
            ),
            RandomForestRegressor(max_depth=5, **FEW),
        ).set_output(transform="pandas"),
        "houses",
        None,
    ),
    "stacked regressors": lambda: (
        make_pipeline(
            houses(),
            StackingRegressor(
                [
                    ("ridge", RidgeCV()),
                    ("rf", RandomForestRegressor(max_depth=4, **FEW)),
                    ("knn", KNeighborsRegressor(5)),
                ],
                final_estimator=GradientBoostingRegressor(**FEW),
                cv=2,
            ),
        ),
        "houses",
        None,
    ),
    "target encoder": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("te", TargetEncoder(**SEED), ["Neighborhood", "ExterQual", "Alley"]), ("num", scaled(), AREAS)]
            ),
            RidgeCV(),
        ),
        "houses",
        None,
    ),
    "rare categories": lambda: (
        make_pipeline(
            make_column_transformer(
                (
                    OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=0.1, drop="if_binary"),
                    [*PLACES, "ExterQual", "Alley"],
                ),
                (scaled(), AREAS),
            ),
            ElasticNetCV(cv=2),
        ),
        "houses",
        None,
    ),
    "bins and powers": lambda: (
        make_pipeline(
            make_column_transformer(
                (KBinsDiscretizer(5, encode="onehot-dense", quantile_method="averaged_inverted_cdf"), ["YearBuilt"]),
                (PowerTransformer(), ["LotArea", "GrLivArea"]),
                (FunctionTransformer(np.log1p, feature_names_out="one-to-one"), ["LotArea"]),
            ),
            MLPRegressor(hidden_layer_sizes=(8,), max_iter=30, **SEED),
        ),
        "houses",
        None,
    ),
    "chosen by trees": lambda: (
        make_pipeline(houses(), SelectFromModel(ExtraTreesRegressor(**FEW)), ExtraTreesRegressor(max_depth=6, **FEW)),
        "houses",
        None,
    ),
    "words of LightGBM": lambda: (
        make_pipeline(
            ColumnTransformer(
                [("ord", OrdinalEncoder(**UNKNOWN), [*PLACES, "Alley"])],
                remainder="passthrough",
                verbose_feature_names_out=False,
            ).set_output(transform="pandas"),
            LGBMRegressor(**QUIET),
        ),
        "houses",
        [*AREAS, *PLACES, "Alley"],
    ),
    "charges as text": lambda: (
        make_pipeline(
            make_column_transformer(
                (make_pipeline(FunctionTransformer(to_number), scaled()), ["TotalCharges"]),
                (scaled(), ["tenure", "MonthlyCharges"]),
                (OneHotEncoder(drop="first"), ["Contract", "SeniorCitizen", "Internet"]),
            ),
            LogisticRegression(),
        ),
        "customers",
        None,
    ),
    "all kinds of columns": lambda: (
        make_pipeline(
            make_column_transformer(
                (SimpleImputer(), make_column_selector(dtype_include="number")),
                (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_include=["category", "string"])),
                ("passthrough", ["SeniorCitizen"]),
            ),
            LGBMClassifier(**QUIET),
        ),
        "customers",
        ["tenure", "MonthlyCharges", "SeniorCitizen", "Contract", "Internet"],
    ),
    "categories of histograms": lambda: (
        HistGradientBoostingClassifier(max_iter=5, categorical_features="from_dtype"),
        "customers",
        ["tenure", "MonthlyCharges", "SeniorCitizen", "Contract"],
    ),
    "categories of LightGBM": lambda: (
        LGBMClassifier(**QUIET),
        "customers",
        ["tenure", "MonthlyCharges", "SeniorCitizen", "Contract"],
    ),
    "searched at random": lambda: (
        RandomizedSearchCV(
            make_pipeline(
                make_column_transformer((coded(), ["Contract", "Payment", "Internet"]), (scaled(), ["MonthlyCharges"])),
                LogisticRegression(),
            ),
            {"logisticregression__C": [0.1, 1, 10]},
            n_iter=2,
            cv=2,
            **SEED,
        ),
        "customers",
        None,
    ),
    **texts.CASES,
}


def fitted(name: str) -> tuple[Any, Any, Any]:
    """Return a case's pipeline, fitted, the rows of its fit, and rows held out."""
    source, key, columns = CASES[name]()
    table, target = TABLES[key]
    table = table if columns is None else table[columns]
    if name == "text":  # steps for text take a Series
        table = table["text"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source.fit(table[:FITTED], target[:FITTED])
    return source, table[:FITTED], table[FITTED:].reset_index(drop=True)
