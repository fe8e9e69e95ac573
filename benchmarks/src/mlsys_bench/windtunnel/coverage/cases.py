"""Sources of the coverage suite: scikit-learn's instances of its own estimators, and pipelines of several libraries."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = 120


@dataclass(frozen=True)
class Case:
    """A source and rows for it."""

    family: str  # "estimators", "pipelines", "LightGBM", ..., or the library of an option set
    name: str
    source: Any  # fitted
    rows: Any  # that it was fitted on, or others
    target: Any = None  # of the rows, where it may be fitted again within a pipeline


def mixed_table(seed: int = 0) -> tuple[Any, Any, Any]:
    """Return a frame of numbers with gaps and of text, classes and prices."""
    import pandas as pd

    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 9, ROWS),
            "fare": rng.gamma(2.0, 9.0, ROWS),
            "city": rng.choice(["Bern", "Oslo", "Rome"], ROWS),
            "kind": rng.choice(list("abcd"), ROWS),
        }
    )
    frame.loc[rng.random(ROWS) < 0.1, "age"] = np.nan
    stays = np.where(frame.age.fillna(40) + 9 * (frame.city == "Rome") + rng.normal(0, 5, ROWS) > 45, "stay", "go")
    return frame, stays, np.exp(1 + 0.02 * frame.fare + 0.5 * (frame.city == "Rome")).to_numpy()


def estimators() -> Iterator[Case]:
    """Yield scikit-learn's own instances of its estimators, fitted on small tables of its own."""
    from sklearn import datasets
    from sklearn.utils import get_tags
    from sklearn.utils._test_common.instance_generator import _tested_estimators

    iris, flower = datasets.load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(iris))[:60]
    iris, flower = iris[order], flower[order]
    tables = [(iris, flower), (iris, (flower > 0).astype(int)), (iris, iris[:, :2]), (np.trunc(iris), flower)]
    tables += [(iris[:, 0], flower), (iris, np.stack([flower > 0, flower > 1], axis=1).astype(int))]
    for estimator in _tested_estimators():
        kind = get_tags(estimator).estimator_type
        for x, y in ([(iris, flower + 0.5)] if kind == "regressor" else []) + tables:
            try:
                fitted = estimator.fit(x, y)
            except Exception:  # noqa: BLE001  third-party code: the next table may suit it
                continue
            if any(hasattr(fitted, method) for method in ("predict", "transform")):
                yield Case("estimators", repr(estimator).replace("\n", "")[:90], fitted, x)
            break


def pipelines() -> Iterator[Case]:
    """Yield pipelines over mixed columns as practitioners write them, with libraries that are installed."""
    frame, stays, price = mixed_table()
    for family, name, make in _makers():
        source = make()
        is_regression = "regress" in name
        yield Case(family, name, source.fit(frame, price if is_regression else stays), frame)


def _columns() -> Any:
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    return make_column_transformer(
        (numbers, ["age", "fare"]), (OneHotEncoder(handle_unknown="ignore"), ["city", "kind"])
    )


def _makers() -> list[tuple[str, str, Callable[[], Any]]]:
    from sklearn import calibration, compose, ensemble, linear_model, model_selection, neighbors, neural_network, svm
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.pipeline import make_pipeline

    def model(inner: Any) -> Callable[[], Any]:
        return lambda: make_pipeline(_columns(), inner)

    def price(inner: Any) -> Any:
        logs = {"func": np.log1p, "inverse_func": np.expm1}
        return compose.TransformedTargetRegressor(make_pipeline(_columns(), inner), **logs)

    logistic, forest = linear_model.LogisticRegression(), ensemble.RandomForestClassifier(10, random_state=0)
    two = [("a", logistic), ("b", forest)]
    grid = {"regressor__ridge__alpha": [0.1, 1.0]}
    found: list[tuple[str, str, Callable[[], Any]]] = [
        ("pipelines", "logistic", model(logistic)),
        ("pipelines", "random forest", model(forest)),
        ("pipelines", "extra trees", model(ensemble.ExtraTreesClassifier(10, random_state=0))),
        ("pipelines", "gradient boosting", model(ensemble.GradientBoostingClassifier(n_estimators=10))),
        ("pipelines", "histogram boosting", model(ensemble.HistGradientBoostingClassifier(max_iter=10))),
        ("pipelines", "support vectors", model(svm.SVC())),
        ("pipelines", "neighbours", model(neighbors.KNeighborsClassifier())),
        ("pipelines", "neighbours by cosine", model(neighbors.KNeighborsClassifier(metric="cosine"))),
        ("pipelines", "multilayer perceptron", model(neural_network.MLPClassifier((8,), max_iter=30, random_state=0))),
        ("pipelines", "Gaussian process", model(GaussianProcessClassifier())),
        ("pipelines", "vote", model(ensemble.VotingClassifier(two, voting="soft"))),
        ("pipelines", "stack", model(ensemble.StackingClassifier(two, cv=2))),
        ("pipelines", "calibrated", model(calibration.CalibratedClassifierCV(logistic, cv=2))),
        ("pipelines", "ridge regression", model(linear_model.Ridge())),
        ("pipelines", "regression of log prices", lambda: price(linear_model.Ridge())),
        (
            "pipelines",
            "regression of log prices, searched",
            lambda: model_selection.GridSearchCV(price(linear_model.Ridge()), grid, cv=2),
        ),
    ]
    if importlib.util.find_spec("lightgbm"):
        import lightgbm

        small: dict[str, Any] = {"n_estimators": 10, "verbose": -1, "n_jobs": 1}
        found += [
            ("LightGBM", "classifier", model(lightgbm.LGBMClassifier(**small))),
            ("LightGBM", "regression of log prices", lambda: price(lightgbm.LGBMRegressor(**small))),
            ("LightGBM", "poisson regression", model(lightgbm.LGBMRegressor(objective="poisson", **small))),
            ("LightGBM", "linear leaves, regression", model(lightgbm.LGBMRegressor(linear_tree=True, **small))),
            ("LightGBM", "dart", model(lightgbm.LGBMClassifier(boosting_type="dart", **small))),
        ]
    if importlib.util.find_spec("xgboost"):
        xgboost = importlib.import_module("xgboost")
        few: dict[str, Any] = {"n_estimators": 10, "n_jobs": 1}
        found += [
            ("XGBoost", "regression", model(xgboost.XGBRegressor(**few))),
            ("XGBoost", "gblinear, regression", model(xgboost.XGBRegressor(booster="gblinear", **few))),
            ("XGBoost", "dart, regression", model(xgboost.XGBRegressor(booster="dart", **few))),
            ("XGBoost", "poisson regression", model(xgboost.XGBRegressor(objective="count:poisson", **few))),
        ]
    if importlib.util.find_spec("catboost"):
        catboost = importlib.import_module("catboost")
        quiet: dict[str, Any] = {"iterations": 10, "verbose": 0, "allow_writing_files": False}
        found += [
            ("CatBoost", "classifier", model(catboost.CatBoostClassifier(**quiet))),
            ("CatBoost", "regression", model(catboost.CatBoostRegressor(**quiet))),
        ]
    if importlib.util.find_spec("imblearn"):
        balanced = importlib.import_module("imblearn.ensemble")
        smote = importlib.import_module("imblearn.over_sampling").SMOTE
        with_sampler = importlib.import_module("imblearn.pipeline").make_pipeline
        found += [
            ("imbalanced-learn", "SMOTE", lambda: with_sampler(_columns(), smote(random_state=0), logistic)),
            ("imbalanced-learn", "balanced forest", model(balanced.BalancedRandomForestClassifier(10, random_state=0))),
            ("imbalanced-learn", "balanced bags", model(balanced.BalancedBaggingClassifier(n_estimators=3))),
            ("imbalanced-learn", "easy ensemble", model(balanced.EasyEnsembleClassifier(n_estimators=3))),
        ]
    return found
