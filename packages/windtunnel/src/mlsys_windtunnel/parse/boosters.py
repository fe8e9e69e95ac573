"""Tables that LightGBM, XGBoost and CatBoost take in ways of their own: names and categories of columns."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.parse.names import known_name, public_name


class _Booster:
    """A booster as an estimator: what parsing asks of those of scikit-learn's kind."""

    stands_for = ""
    _estimator_type = "regressor"

    def __init__(self, booster: Any) -> None:
        self.booster_ = booster

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return no parameters: it was fitted before."""
        return {}

    def fit(self, X: Any, y: Any) -> Any:  # noqa: N803
        """Refuse: training is the library's."""
        raise InvalidInputError(f"a {self.stands_for} is fitted by its library's train()")

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, multi_output=True),
            regressor_tags=RegressorTags(),
            input_tags=InputTags(sparse=True, allow_nan=True, categorical=True),
        )


class LightGBMBooster(_Booster):
    """A ``lightgbm.Booster``; ``predict`` is the booster's."""

    stands_for = "lightgbm.basic.Booster"

    def __init__(self, booster: Any) -> None:
        super().__init__(booster)
        self.n_features_in_ = int(booster.num_feature())
        names = booster.feature_name()
        if names != [f"Column_{index}" for index in range(len(names))]:
            self.feature_names_in_ = np.array(names, object)

    @property
    def n_outputs_(self) -> int:
        """Values a row."""
        return int(self.booster_.num_model_per_iteration())

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the booster's own answer."""
        return self.booster_.predict(X)


class XGBoostBooster(_Booster):
    """An ``xgboost.Booster``; ``predict`` makes the ``DMatrix`` that the booster takes."""

    stands_for = "xgboost.core.Booster"

    def __init__(self, booster: Any) -> None:
        super().__init__(booster)
        self.n_features_in_ = int(booster.num_features())
        if booster.feature_names is not None:
            self.feature_names_in_ = np.array(booster.feature_names, object)

    @property
    def n_outputs_(self) -> None:
        """Its objective tells the values a row, which the converter reads."""
        return None

    def get_booster(self) -> Any:
        """Return the booster."""
        return self.booster_

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Return the booster's own answer."""
        matrix = importlib.import_module("xgboost").DMatrix
        return self.booster_.predict(X if isinstance(X, matrix) else matrix(X, enable_categorical=True))


_BOOSTERS = {"lightgbm.basic.Booster": LightGBMBooster, "xgboost.core.Booster": XGBoostBooster}


def as_estimator(model: Any) -> Any:
    """Return a booster of LightGBM's or XGBoost's own as an estimator; anything else as it is."""
    made = _BOOSTERS.get(public_name(type(model)))
    return model if made is None else made(model)


def package_of(estimator: object) -> str:
    """Return the package that an estimator comes from: "sklearn", "catboost"; of a subclass, its base's."""
    return known_name(type(estimator)).partition(".")[0]


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
