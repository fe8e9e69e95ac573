"""Contestants of ``windtunnel-drift``: ways to keep a fitted pipeline current by new labels."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlsys_bench.windtunnel.drift_data import Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TREES: dict[str, Any] = {"n_estimators": 50, "num_leaves": 31}


def pipeline(stream: Stream, num_threads: int) -> Any:
    """Return the pipeline, unfitted."""
    from lightgbm import LGBMClassifier
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    words = OneHotEncoder(handle_unknown="ignore")
    columns = make_column_transformer((StandardScaler(), list(stream.numbers)), (words, list(stream.words)))
    return make_pipeline(columns, LGBMClassifier(**TREES, verbose=-1, n_jobs=num_threads))


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return all rows, one sparse table, and all labels."""
    import numpy as np
    from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped]

    return vstack([csr_matrix(rows) for rows, _ in parts]).tocsr(), np.concatenate([labels for _, labels in parts])


class _WindTunnel:
    """``update`` of the translated pipeline."""

    def __init__(self, source: Any) -> None:
        from mlsys_windtunnel.convert.translation import translate
        from mlsys_windtunnel.finetune.update import update

        self._update, self._start = update, translate(source)
        self._module = self._start
        self._memory: Any = None

    def update(self, x: Any, y: Any) -> None:
        state = self._update(self._start, x, y, memory=self._memory)
        self._module, self._memory = state.module, state.memory

    def scores(self, x: Any) -> Any:
        return self._module.predict_proba(x)[:, 1]


class Replay:
    """The pipeline, fitted anew on its first rows and all labels sampled so far: what a keeper of all rows would do."""

    def __init__(self, stream: Stream, first: npt.NDArray[np.int64], num_threads: int) -> None:
        self._stream, self._rows, self._num_threads = stream, [first], num_threads
        self._model: Any = None

    def update(self, sample: npt.NDArray[np.int64]) -> None:
        """Take rows of the stream, by index."""
        self._rows.append(sample)
        self._model = None

    def scores(self, x: Any) -> Any:
        """Return the scores of rows ``[rows]``, after a fit if rows were taken since the last."""
        import numpy as np

        if self._model is None:
            rows, stream = np.concatenate(self._rows), self._stream
            self._model = pipeline(stream, self._num_threads).fit(stream.frame.iloc[rows], stream.target[rows])
        return self._model.predict_proba(x)[:, 1]


class _LightGBM:
    """The pipeline's booster, changed by a function of it and of all labels sampled so far, or of the last ones."""

    def __init__(self, source: Any, change: Callable[[Any, Any, Any], Any], *, begins_anew: bool) -> None:
        self._columns, self._first = source[0], source[-1].booster_
        self._booster, self._change, self._begins_anew = self._first, change, begins_anew
        self._seen: list[tuple[Any, Any]] = []

    def update(self, x: Any, y: Any) -> None:
        self._seen.append((self._columns.transform(x), y))
        rows, target = _joined(self._seen if self._begins_anew else self._seen[-1:])
        self._booster = self._change(self._first if self._begins_anew else self._booster, rows, target)

    def scores(self, x: Any) -> Any:
        return self._booster.predict(self._columns.transform(x))


class _XGBoost:
    """XGBoost's ``process_type=update``: leaves refreshed on all labels sampled so far."""

    def __init__(self, source: Any, x: Any, y: Any, num_threads: int) -> None:
        self._xgboost = importlib.import_module("xgboost")
        self._columns, self._seen = source[0], []  # type: ignore[var-annotated]
        self._options = {"objective": "binary:logistic", "eta": 0.1, "nthread": num_threads}
        tree = {"max_leaves": TREES["num_leaves"], "grow_policy": "lossguide", "tree_method": "hist"}
        self._num_trees = TREES["n_estimators"]
        rows = self._xgboost.DMatrix(self._columns.transform(x), y)
        self._first = self._booster = self._xgboost.train({**self._options, **tree}, rows, self._num_trees)

    def update(self, x: Any, y: Any) -> None:
        self._seen.append((self._columns.transform(x), y))
        rows, target = _joined(self._seen)
        refresh = {"process_type": "update", "updater": "refresh", "refresh_leaf": True}
        matrix = self._xgboost.DMatrix(rows, target)
        self._booster = self._xgboost.train(
            {**self._options, **refresh}, matrix, self._num_trees, xgb_model=self._first.copy()
        )

    def scores(self, x: Any) -> Any:
        return self._booster.predict(self._xgboost.DMatrix(self._columns.transform(x)))


def contestants(source: Any, x: Any, y: Any, num_threads: int) -> dict[str, Any]:
    """Return what keeps a model current, by name; each has ``update`` and ``scores``."""
    import lightgbm

    options = {"objective": "binary", "verbose": -1, "num_threads": num_threads, "num_leaves": 7, "learning_rate": 0.05}

    def refitted(booster: Any, rows: Any, target: Any) -> Any:
        return booster.refit(rows, target, decay_rate=0.9)

    def continued(booster: Any, rows: Any, target: Any) -> Any:
        return lightgbm.train(options, lightgbm.Dataset(rows, target), 5, init_model=booster)

    found: dict[str, Any] = {
        "WindTunnel update": _WindTunnel(source),
        "LightGBM refit": _LightGBM(source, refitted, begins_anew=True),
        "LightGBM init_model": _LightGBM(source, continued, begins_anew=False),
    }
    if importlib.util.find_spec("xgboost"):
        found["XGBoost update"] = _XGBoost(source, x, y, num_threads)
    return found
