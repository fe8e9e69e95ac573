"""Tables that CatBoost's estimators take, beyond what scikit-learn's tags say of them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mlsys_windtunnel.parse.libraries import Library


def column_names(estimator: Any) -> list[str] | None:
    """Return the columns that a model was fitted on; None: they had no names.

    CatBoost calls columns without names by their indices, as it calls those of a frame whose labels are 0, 1, 2. Which
    of the two it was shows in whether it takes a frame with other names.
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


CATBOOST = Library(
    package="catboost",
    takes_nan=True,
    takes_inf=True,
    takes_tuples=False,
    labels_are_names=True,
    reads_by_name=True,
    column_names=column_names,
    category_columns=lambda estimator: tuple(estimator.get_cat_feature_indices()),
)
