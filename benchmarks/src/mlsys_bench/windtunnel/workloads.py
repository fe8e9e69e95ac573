"""Fitted models and fresh rows for the inference suite, all from seeds.

Numbers are multiples of 1/256, and fresh ones lie 1/1024 beside: thresholds midway between two numbers are exact in
float32 and no fresh row ties with one, so that cases that compute in float32 can be right. The census table is
as it is.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pathlib import Path

NUM_FEATURES = 54  # as many as covertype has
_TRAIN_ROWS = 5_000
_CATEGORIES = 12
_BESIDE = 1 / 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """A fitted binary classifier and rows that it has not seen."""

    name: str
    source: Any  # fitted; has predict_proba
    table: Any  # [rows, columns]: numpy float64, or a pandas DataFrame for pipelines
    words: tuple[str, ...] = ()  # columns of text

    @property
    def is_pipeline(self) -> bool:
        """True where columns are encoded before the model."""
        return not isinstance(self.table, np.ndarray)


def workloads(rows: int, *, num_threads: int, adult: Path | None = None, num_trees: int = 100) -> list[Workload]:
    """Make the suite's models, each with ``rows`` fresh rows.

    Args:
        rows: Fresh rows of each table.
        num_threads: Threads that the sources may use to answer; they are fitted on one.
        adult: The census table; None leaves its pipeline out.
        num_trees: Trees of each ensemble.
    """
    # OpenMP's threads wait for each other actively: beside other work, fitting on several takes many times longer
    with importlib.import_module("threadpoolctl").threadpool_limits(1):
        return [*_plain(rows, num_threads, num_trees), *_pipelines(rows, num_threads, num_trees, adult)]


def _plain(rows: int, num_threads: int, num_trees: int) -> list[Workload]:
    from lightgbm import LGBMClassifier
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(_TRAIN_ROWS + rows, NUM_FEATURES)) * 256) / 256
    score = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + (x[:, 3] > 0.5) + np.abs(x[:, 4]) + x[:, 5:20].sum(axis=1) / 4
    y = (score + rng.normal(size=len(x)) * 0.5 > 1).astype(np.int64)
    train, fresh, labels = x[:_TRAIN_ROWS], x[_TRAIN_ROWS:] + _BESIDE, y[:_TRAIN_ROWS]
    sources = {
        f"LightGBM {num_trees}x64": LGBMClassifier(
            n_estimators=num_trees, num_leaves=64, random_state=0, verbose=-1, n_jobs=1
        ),
        f"RandomForest {num_trees}": RandomForestClassifier(num_trees, max_depth=10, random_state=0, n_jobs=1),
        f"RandomForest {num_trees}, deep": RandomForestClassifier(num_trees, random_state=0, n_jobs=1),
        f"HistGradientBoosting {num_trees}": HistGradientBoostingClassifier(max_iter=num_trees, random_state=0),
        "LogisticRegression": LogisticRegression(max_iter=500),
    }
    return [
        Workload(name, _with_threads(source.fit(train, labels), num_threads), fresh) for name, source in sources.items()
    ]


def _pipelines(rows: int, num_threads: int, num_trees: int, adult: Path | None) -> list[Workload]:
    from lightgbm import LGBMClassifier
    from sklearn.linear_model import LogisticRegression

    table, y, words = _mixed_table(_TRAIN_ROWS + rows)
    last = {
        "LightGBM": LGBMClassifier(n_estimators=num_trees, num_leaves=31, random_state=0, verbose=-1, n_jobs=1),
        "LogisticRegression": LogisticRegression(max_iter=500),
    }
    fitted = []
    for name, model in last.items():
        pipeline = _pipeline(table, words, model).fit(table[:_TRAIN_ROWS], y[:_TRAIN_ROWS])
        fresh = table[_TRAIN_ROWS:].reset_index(drop=True)
        fitted.append(Workload(f"pipeline, {name}", _with_threads(pipeline, num_threads), fresh, words))
    if adult is not None:
        table, y, words = _adult(adult)
        pipeline = _pipeline(table, words, last["LightGBM"]).fit(table[:_TRAIN_ROWS], y[:_TRAIN_ROWS])
        fresh = table[_TRAIN_ROWS : _TRAIN_ROWS + rows].reset_index(drop=True)
        fitted.append(Workload("adult, pipeline, LightGBM", _with_threads(pipeline, num_threads), fresh, words))
    return fitted


def _pipeline(table: Any, words: tuple[str, ...], model: Any) -> Any:
    from sklearn.base import clone
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = [name for name in table.columns if name not in words]
    columns = ColumnTransformer(
        [
            ("numbers", StandardScaler(), numbers),
            ("words", OneHotEncoder(handle_unknown="ignore", sparse_output=False), list(words)),
        ]
    )
    return Pipeline([("columns", columns), ("model", clone(model))])


def _mixed_table(rows: int) -> tuple[Any, npt.NDArray[np.int64], tuple[str, ...]]:
    """Make a table with ten columns of numbers and six of words."""
    import pandas as pd

    rng = np.random.default_rng(1)
    numbers = np.round(rng.normal(size=(rows, 10)) * 256) / 256
    numbers[_TRAIN_ROWS:] += _BESIDE
    codes = rng.integers(0, _CATEGORIES, size=(rows, 6))
    effect = rng.normal(size=(6, _CATEGORIES))
    score = numbers[:, :4].sum(axis=1) + numbers[:, 4] * numbers[:, 5] + effect[np.arange(6), codes].sum(axis=1)
    y: npt.NDArray[np.int64] = (score + rng.normal(size=rows) > 0).astype(np.int64)
    labels = np.array([f"kind-{code:02d}" for code in range(_CATEGORIES)], dtype=object)
    words = tuple(f"word{number}" for number in range(6))
    columns = {f"number{number}": numbers[:, number] for number in range(10)}
    return pd.DataFrame(columns | {name: labels[codes[:, place]] for place, name in enumerate(words)}), y, words


def _adult(path: Path) -> tuple[Any, npt.NDArray[np.int64], tuple[str, ...]]:
    """Load the census table, shuffled; the label is whether a person earns more than 50,000 dollars."""
    import pandas as pd

    table = pd.read_parquet(path).sample(frac=1, random_state=0).reset_index(drop=True)
    table.columns = [name.replace("-", "_") for name in table.columns]  # skl2onnx renames others
    label = table.pop("income")
    words = tuple(name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name]))
    numbers = {name: np.float64 for name in table.columns if name not in words}
    y = np.asarray(label.str.contains(">50K"), np.int64)
    return table.astype(numbers), y, words


def _with_threads(source: Any, num_threads: int) -> Any:
    """Let the source answer on ``num_threads`` threads; sources without that argument follow threadpoolctl's limit."""
    model = source.steps[-1][1] if hasattr(source, "steps") else source
    if "n_jobs" in model.get_params() and hasattr(model, "n_estimators"):
        model.set_params(n_jobs=num_threads)
    return source
