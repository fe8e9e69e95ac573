"""Parts that pipelines of notebooks share: functions, transformers without a state, preparations of a table."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import (
    ColumnTransformer,
)
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    StandardScaler,
)

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
