"""Outside models, all in one table: how each is fitted, and with which candidates.

Everybody has three candidates of options, chosen between by validation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlsys_bench.windtunnel.experiments.sources import frame_of

if TYPE_CHECKING:
    from mlsys_bench.windtunnel.experiments.sources import CodedTask

Scores = npt.NDArray[np.float64]
PATIENCE = 60  # rounds without a better AUC

LIGHTGBM: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.05, "num_leaves": 64, "min_child_samples": 50, "cat_smooth": 50, "n_estimators": 1500},
    {"learning_rate": 0.05, "num_leaves": 511, "min_child_samples": 20, "as_numbers": True, "n_estimators": 6000},
    {"learning_rate": 0.05, "num_leaves": 255, "min_child_samples": 50, "as_numbers": True, "n_estimators": 6000},
)
XGBOOST: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.08, "max_depth": 8, "min_child_weight": 10, "n_estimators": 800},
    {"learning_rate": 0.05, "max_depth": 10, "min_child_weight": 20, "n_estimators": 1200},
    {"learning_rate": 0.05, "max_depth": 12, "min_child_weight": 50, "n_estimators": 1200},
)
CATBOOST: tuple[Mapping[str, Any], ...] = (
    {"learning_rate": 0.1, "depth": 7, "iterations": 800},
    {"learning_rate": 0.1, "depth": 10, "iterations": 500},
    {"learning_rate": 0.05, "depth": 8, "iterations": 1500},
)


def lightgbm(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows; ``as_numbers`` gives codes as numbers in place of categories."""
    package = importlib.import_module("lightgbm")
    options = {"n_estimators": 100, **options}
    kind = "int64" if options.pop("as_numbers", False) else "category"
    rounds = options.pop("n_estimators")
    train, valid, test = (frame_of(part, task, kind) for part in (task.train, task.valid, task.test))
    data = package.Dataset(train, task.train.target)
    model = package.train(
        {
            "objective": "binary",
            "metric": "auc",
            "subsample": 0.8,
            "subsample_freq": 1,
            "colsample_bytree": 0.7,
            "num_threads": num_threads,
            "seed": seed,
            "verbose": -1,
            **options,
        },
        data,
        rounds,
        valid_sets=[package.Dataset(valid, task.valid.target, reference=data)],
        callbacks=[package.early_stopping(PATIENCE, verbose=False)],
    )
    return model.predict(valid), model.predict(test)


def xgboost(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows."""
    train, valid, test = (frame_of(part, task, "category") for part in (task.train, task.valid, task.test))
    model = importlib.import_module("xgboost").XGBClassifier(
        subsample=0.8,
        colsample_bytree=0.7,
        enable_categorical=True,
        tree_method="hist",
        eval_metric="auc",
        early_stopping_rounds=PATIENCE,
        n_jobs=num_threads,
        random_state=seed,
        **options,
    )
    model.fit(train, task.train.target, eval_set=[(valid, task.valid.target)], verbose=False)
    return model.predict_proba(valid)[:, 1], model.predict_proba(test)[:, 1]


def catboost(task: CodedTask, options: Mapping[str, Any], *, seed: int, num_threads: int) -> tuple[Scores, Scores]:
    """Return scores of the validation and test rows."""
    train, valid, test = (frame_of(part, task, "int64") for part in (task.train, task.valid, task.test))
    model = importlib.import_module("catboost").CatBoostClassifier(
        eval_metric="AUC",
        early_stopping_rounds=PATIENCE,
        max_ctr_complexity=2,
        cat_features=[name for name in train.columns if name.startswith("word")],
        thread_count=num_threads,
        random_seed=seed,
        verbose=0,
        allow_writing_files=False,
        **options,
    )
    model.fit(train, task.train.target, eval_set=(valid, task.valid.target))
    return model.predict_proba(valid)[:, 1], model.predict_proba(test)[:, 1]


@dataclass(frozen=True, slots=True)
class Outside:
    """A model that is no translation."""

    candidates: tuple[Mapping[str, Any], ...]
    # task, options, seed and number of threads -> scores of validation and test rows
    fit: Callable[..., tuple[Scores, Scores]]
    package: str | None = None  # that must be installed, where it is no dependency


OUTSIDE: dict[str, Outside] = {
    "lightgbm": Outside(LIGHTGBM, lightgbm),
    "xgboost": Outside(XGBOOST, xgboost, package="xgboost"),
    "catboost": Outside(CATBOOST, catboost, package="catboost"),
}
