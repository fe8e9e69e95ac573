"""Forty pipelines as notebooks and scikit-learn's gallery have them, each on its table."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import (
    ColumnTransformer,
    TransformedTargetRegressor,
    make_column_selector,
    make_column_transformer,
)
from sklearn.decomposition import PCA, TruncatedSVD
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
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfTransformer, TfidfVectorizer
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectPercentile, chi2, f_regression
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import ElasticNetCV, Lasso, LogisticRegression, PoissonRegressor, RidgeCV, SGDClassifier
from sklearn.linear_model import LogisticRegressionCV as LogisticCV
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, TunedThresholdClassifierCV
from sklearn.naive_bayes import ComplementNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    RobustScaler,
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC, LinearSVC

from tests.oracles.windtunnel_notebooks.tables import FITTED, TABLES

SIZES, CLASSES = ["Age", "Fare", "SibSp", "Parch"], ["Pclass", "Sex", "Embarked"]
AREAS, PLACES = ["LotArea", "LotFrontage", "OverallQual", "YearBuilt", "GrLivArea"], ["Neighborhood", "CentralAir"]
SEED: dict[str, Any] = {"random_state": 0}
FEW: dict[str, Any] = {"n_estimators": 5, "random_state": 0}
QUIET: dict[str, Any] = {"n_estimators": 5, "min_child_samples": 5, "verbose": -1, "n_jobs": 1}
UNKNOWN: dict[str, Any] = {"handle_unknown": "use_encoded_value", "unknown_value": -1}


class Family(BaseEstimator, TransformerMixin):
    """Adds the size of a family, as tutorials do."""

    def fit(self, X: pd.DataFrame, y: Any = None) -> Family:  # noqa: N803  scikit-learn's name
        """Learn nothing."""
        return self

    def transform(self, X: pd.DataFrame) -> pd.DataFrame:  # noqa: N803
        """Return the table with two columns more."""
        size = X["SibSp"] + X["Parch"] + 1
        return X.assign(FamilySize=size, IsAlone=(size == 1).astype(int))


class TextStats(BaseEstimator, TransformerMixin):
    """Lengths of texts, as scikit-learn's gallery has it."""

    def fit(self, texts: Any, y: Any = None) -> TextStats:
        """Learn nothing."""
        return self

    def transform(self, texts: Any) -> np.ndarray:
        """Return [length, sentences] of each text."""
        return np.array([[len(text), text.count(".") + text.count("!")] for text in texts])


class Columns(BaseEstimator, TransformerMixin):
    """Chooses columns by name, as notebooks did before ColumnTransformer."""

    def __init__(self, names: Any = None) -> None:
        self.names = names

    def fit(self, X: pd.DataFrame, y: Any = None) -> Columns:  # noqa: N803
        """Learn nothing."""
        return self

    def transform(self, X: pd.DataFrame) -> Any:  # noqa: N803
        """Return the columns."""
        return X[self.names]


def title(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the title within a name."""
    return frame["Name"].str.extract(r", (\w+)\.", expand=False).replace({"Rev": "Rare"}).to_frame()


def deck(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the deck of a cabin."""
    return frame[["Cabin"]].apply(lambda column: column.fillna("U").str[0])


def sold(frame: pd.DataFrame) -> pd.DataFrame:
    """Return parts of a date."""
    return pd.DataFrame({"year": frame["Sold"].dt.year, "month": frame["Sold"].dt.month})


def age_of_house(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the age at the sale."""
    return frame.assign(HouseAge=frame["Sold"].dt.year - frame["YearBuilt"]).drop(columns=["Sold", "YearBuilt"])


def to_number(frame: pd.DataFrame) -> pd.DataFrame:
    """Return texts as numbers, missing where they are none."""
    return frame.apply(pd.to_numeric, errors="coerce")


def sine(period: int) -> FunctionTransformer:
    """Return the sine over a period."""
    return FunctionTransformer(lambda x: np.sin(x / period * 2 * np.pi))


def cosine(period: int) -> FunctionTransformer:
    """Return the cosine over a period."""
    return FunctionTransformer(lambda x: np.cos(x / period * 2 * np.pi))


def first(texts: pd.DataFrame) -> Any:
    """Return one column, as text steps want it."""
    return texts["text"]


def scaled(imputer: Any = None) -> Pipeline:
    """Return steps for numbers."""
    return Pipeline([("imputer", imputer or SimpleImputer(strategy="median")), ("scaler", StandardScaler())])


def coded(**options: Any) -> Pipeline:
    """Return steps for words."""
    return Pipeline(
        [
            ("imputer", SimpleImputer(strategy="most_frequent")),
            ("onehot", OneHotEncoder(handle_unknown="ignore", **options)),
        ]
    )


def passengers(*more: Any, **options: Any) -> ColumnTransformer:
    """Return the preparation of every notebook on passengers."""
    return ColumnTransformer([("num", scaled(), SIZES), ("cat", coded(), CLASSES), *more], **options)


def houses(*more: Any, **options: Any) -> ColumnTransformer:
    """Return that of notebooks on houses."""
    return ColumnTransformer([("num", scaled(), AREAS), ("cat", coded(), PLACES), *more], **options)


QUALITY = OrdinalEncoder(categories=[["Fa", "TA", "Gd", "Ex"]])
HAS_XGBOOST = importlib.util.find_spec("xgboost") is not None


def boosted() -> Any:
    """Return XGBoost's classifier, or LightGBM's where it is not installed."""
    if not HAS_XGBOOST:
        return LGBMClassifier(**QUIET)
    return importlib.import_module("xgboost").XGBClassifier(n_estimators=5, max_depth=3, n_jobs=1)


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
