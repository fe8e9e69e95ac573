"""Boosters of LightGBM's and XGBoost's own as estimators, and the tables that these libraries take."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.parse.libraries import Library, plugin_libraries
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
    """Return the package that an estimator comes from: "sklearn", "xgboost"; of a subclass, its base's."""
    return known_name(type(estimator)).partition(".")[0]


def _lightgbm_categories(estimator: Any) -> tuple[int, ...] | None:
    return () if getattr(getattr(estimator, "booster_", None), "pandas_categorical", None) == [] else None


def _xgboost_categories(estimator: Any) -> tuple[int, ...]:
    """Return the columns of categories: XGBoost would read the codes of one that held numbers when it was fitted."""
    kinds = estimator.get_booster().feature_types or ()
    return tuple(index for index, kind in enumerate(kinds) if kind == "c")


_OTHER = Library(package="")
_BUILT_IN = {
    "lightgbm": Library(package="lightgbm", takes_inf=True, category_columns=_lightgbm_categories),
    "xgboost": Library(
        package="xgboost",
        takes_inf=True,
        unstored_is_missing=True,
        labels_are_names=True,
        category_columns=_xgboost_categories,
    ),
}


def library_of(estimator: object) -> Library:
    """Return the traits of an estimator's library; those of scikit-learn's estimators where nothing else is known."""
    package = package_of(estimator)
    return _BUILT_IN.get(package) or plugin_libraries().get(package, _OTHER)


def category_columns_of(estimator: Any) -> tuple[int, ...] | None:
    """Return the indices of the columns that may be of pandas' category; None: all may, or it does not tell."""
    columns = library_of(estimator).category_columns
    return None if columns is None else columns(estimator)
