"""scikit-learn's own instances of all of its estimators, and LightGBM's, fitted on scikit-learn's own data sets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.base import clone
from sklearn.utils import get_tags
from sklearn.utils._test_common.instance_generator import _tested_estimators

ROWS = 60  # to fit on
SHOWN = 8  # of which inputs are made


@dataclass(frozen=True)
class Source:
    """A fitted estimator."""

    name: str
    estimator: Any
    x: Any  # some rows that it was fitted on, [rows, columns]; None: it could not be fitted
    names: list[str] | None
    reason: str = ""  # why not


@lru_cache
def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[:ROWS]
    return np.ascontiguousarray(x[order], np.float64), y[order]


def _candidates(estimator: Any) -> list[tuple[Any, Any]]:
    """Tables and targets on which it may be fitted, best first."""
    iris, flower = _data("iris")
    diabetes, progression = _data("diabetes")
    bodies, exercise = _data("linnerud")
    binary = (flower > 0).astype(int)
    tags = get_tags(estimator)
    found: list[tuple[Any, Any]] = []
    if tags.input_tags.one_d_array and not tags.input_tags.two_d_array:
        found.append((iris[:, 0], flower))
    if tags.estimator_type == "regressor":
        found += [(diabetes[:, :4], progression), (diabetes[:, :1], progression), (np.abs(iris), flower + 0.5)]
    found += [(iris, flower), (iris, binary), (bodies, exercise), (iris, np.stack([binary, flower], axis=1))]
    found += [(iris, np.stack([binary, 1 - binary], axis=1)), (np.trunc(iris), flower), (iris @ iris.T, flower)]
    return found


def fitted(estimator: Any, *, with_names: bool = False) -> Source:
    """An estimator on the first data that it takes."""
    name, errors = repr(estimator).replace("\n", "")[:120], []
    for x, y in _candidates(estimator):
        names = [f"column{index}" for index in range(x.shape[1])] if with_names and x.ndim == 2 else None
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                given = clone(estimator)
                if "random_state" in given.get_params():
                    given.set_params(random_state=0)
                given.fit(x if names is None else pd.DataFrame(x, columns=names), y)
            except Exception as error:  # noqa: BLE001  third-party code
                errors.append(" ".join(str(error).split())[:80])
                continue
        if x.ndim == 2:
            return Source(name, given, x[:SHOWN], names)
        errors.append("takes one dimension")
    return Source(name, estimator, None, None, "; ".join(dict.fromkeys(errors))[:160])


def unfitted() -> list[Any]:
    """Every instance that scikit-learn tests, then LightGBM's."""
    import lightgbm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimators = list(_tested_estimators())
    few = {"n_estimators": 5, "min_child_samples": 2, "verbose": -1, "n_jobs": 1}
    return [*estimators, lightgbm.LGBMClassifier(**few), lightgbm.LGBMRegressor(**few)]


def all_sources(*, with_names: bool = False) -> Iterator[Source]:
    """The same, fitted."""
    return (fitted(estimator, with_names=with_names) for estimator in unfitted())
