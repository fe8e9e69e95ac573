"""Tables that LightGBM, XGBoost and CatBoost take in ways of their own: names and categories of columns."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def package_of(estimator: object) -> str:
    """Return the package that an estimator comes from: "sklearn", "catboost"."""
    return type(estimator).__module__.partition(".")[0]


def labels_are_names(estimator: object) -> bool:
    """Return whether labels of a frame that are no texts count as names: XGBoost and CatBoost spell them as texts."""
    return package_of(estimator) in ("catboost", "xgboost")


def reads_by_name(estimator: object) -> bool:
    """Return whether a frame's columns are looked up by name, in any order and among others."""
    return package_of(estimator) == "catboost"


def catboost_names(estimator: Any) -> list[str] | None:
    """Return the columns that a model of CatBoost was fitted on; None: they had no names.

    It calls columns without names by their indices, as it calls those of a frame whose labels are 0, 1, 2. Which of the
    two it was shows in whether it takes a frame with other names.
    """
    names = [str(name) for name in getattr(estimator, "feature_names_", None) or ()]
    if names and (names != [str(index) for index in range(len(names))] or _refuses_other_names(estimator, names)):
        return names
    return None


def _refuses_other_names(estimator: Any, names: list[str]) -> bool:
    import pandas as pd

    refusal = importlib.import_module("catboost").CatBoostError
    rows = pd.DataFrame(np.zeros((1, len(names)), np.int64), columns=[f"other {name}" for name in names])
    try:
        estimator.predict(rows)
    except refusal:
        return True
    return False


def category_columns_of(estimator: Any) -> tuple[int, ...] | None:
    """Return the indices of the columns that may be of pandas' category; None: all may, or the estimator does not tell.

    XGBoost would read the codes of a column that held numbers when it was fitted; the others refuse it.
    """
    package = package_of(estimator)
    if package == "lightgbm":
        booster = getattr(estimator, "booster_", None)
        return () if getattr(booster, "pandas_categorical", None) == [] else None
    if package == "catboost":
        return tuple(estimator.get_cat_feature_indices())
    if package == "xgboost":
        kinds = estimator.get_booster().feature_types or ()
        return tuple(index for index, kind in enumerate(kinds) if kind == "c")
    return None
