"""The suite ``windtunnel-public``: is fine-tuning above a *tuned* pipeline of boosted trees, and never below it?

Eight public sets that packages carry. ``tuned`` is a LightGBM pipeline whose options a random search chose on three
folds of the training rows, with early stopping, fitted on all of them; ``fine-tuned`` the estimator's default that
begins with it; ``members`` the same with refits beside its trees. XGBoost, CatBoost, RealMLP and TabM take part where
they are installed. Each finished fit is a line of a journal, so that a run goes on where it was stopped.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Section, Table

from mlsys_bench.harness.journal import Journal
from mlsys_bench.windtunnel.public_sets import SETS, check_sets, make_pipeline_of

if TYPE_CHECKING:
    import pandas as pd
    from mlsys_core.bench import BenchContext

NAME = "windtunnel-public"


def run(
    context: BenchContext,
    *,
    seeds: int = 5,
    first_seed: int = 0,
    rows: int = 2_000,
    trials: int = 6,
    data: tuple[str, ...] = (),
    peer_seeds: int = 1,
) -> Section:
    """Fit on each set and score other rows: AUC of classes, R2 of numbers.

    Args:
        context: The suite's context; quick has one seed, 600 rows, one trial, two members and no peers.
        seeds: Number of splits and draws of rows.
        first_seed: The first of them; the others follow.
        rows: Training rows at most; five times as many test rows at most.
        trials: Options that the search tries; the first are LightGBM's own.
        data: Sets; all if none.
        peer_seeds: Seeds of the peers that are installed.
    """
    import torch

    check_sets(data)
    members = MEMBERS
    if context.is_quick:
        seeds, rows, trials, peer_seeds, members = 1, 600, 1, 0, 2
    torch.set_num_threads(context.num_threads)
    setting = {"rows": rows, "trials": trials, "members": members}
    journal = Journal(context.output_dir / f"{NAME}{'-quick' if context.is_quick else ''}.jsonl", setting, key="fit")
    absent = missing_peers()
    for seed in range(first_seed, first_seed + seeds):
        peers = [peer for peer in PEERS if peer not in absent] if seed < first_seed + peer_seeds else []
        for name in data or SETS:
            for contestant in (*CONTESTANTS, *peers):
                key = f"{name}/{seed}/{contestant}"
                if key in journal.finished:
                    continue
                options = journal.finished.get(f"{name}/{seed}/tuned", {}).get("options", {})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = fit_and_score(contestant, name, seed, setting, options, num_threads=context.num_threads)
                journal.add({"fit": key, **found})
                shown = f"{key}: {found['score']:.4f}, {found['seconds']:.0f} s"
                context.console.print(shown, highlight=False, markup=False)
    results = summary(journal.finished)
    caption = f"{rows:,} training rows at most, {trials} trials; AUC, R2 where a number is predicted"
    missing = [f"Not run here: {', '.join(absent)} (not installed)"] if absent else []
    return Section(
        "WindTunnel: beside tuned pipelines",
        [
            Table(["set", "contestant", "seeds", "score", "above tuned, points", "lowest"], _rows(results), caption),
            *missing,
        ],
        data={"results": results, **setting},
    )


def summary(finished: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by set and contestant the records by seed, and the gains over ``tuned`` in points."""
    found: dict[str, dict[str, Any]] = {name: {} for name in SETS}
    for key, record in finished.items():
        name, seed, contestant = key.split("/")
        facts = found[name].setdefault(contestant, {"seeds": {}})
        facts["seeds"][seed] = {field: value for field, value in record.items() if field != "fit"}
    for contestants in found.values():
        for facts in contestants.values():
            tuned = contestants["tuned"]["seeds"]
            gains = [100 * (each["score"] - tuned[seed]["score"]) for seed, each in facts["seeds"].items()]
            facts["gain"] = _gain(gains)
    return {name: contestants for name, contestants in found.items() if contestants}


def _gain(gains: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of gains, its standard error over the seeds, and the lowest of a seed."""
    import numpy as np

    error = float(np.std(gains, ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else None
    return {"mean": float(np.mean(gains)), "se": error, "lowest": float(min(gains))}


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for name, contestants in results.items():
        for contestant, facts in contestants.items():
            gain, scores = facts["gain"], [each["score"] for each in facts["seeds"].values()]
            cells = [f"{gain['mean']:+.2f}" + ("" if gain["se"] is None else f" ± {gain['se']:.2f}")]
            cells = ["", ""] if contestant == "tuned" else [*cells, f"{gain['lowest']:+.2f}"]
            rows.append([name, contestant, str(len(scores)), f"{sum(scores) / len(scores):.4f}", *cells])
    return rows


CONTESTANTS = ("tuned", "fine-tuned", "members")
MEMBERS = 10
PEERS = {"XGBoost": "xgboost", "CatBoost": "catboost", "RealMLP": "pytabkit", "TabM": "pytabkit"}  # and their packages
NETWORKS = {"RealMLP": "RealMLP_TD_S_", "TabM": "TabM_D_"}  # names within pytabkit, before Classifier or Regressor
ROUNDS = 2_000  # at most, of peers that are boosted trees
HELD_OUT = 0.1  # share of the training rows that stops them
ANSWERED = 1_000  # rows at once, when answers are timed
TURNS = 5


def missing_peers() -> list[str]:
    """Return the peers whose packages are not installed."""
    return [peer for peer, package in PEERS.items() if importlib.util.find_spec(package) is None]


def fit_and_score(
    contestant: str, name: str, seed: int, setting: Mapping[str, Any], options: Mapping[str, Any], *, num_threads: int
) -> dict[str, Any]:
    """Fit one contestant and score it: AUC of classes, R2 of numbers.

    Args:
        contestant: One of :data:`CONTESTANTS` or :data:`PEERS`.
        name: The set.
        seed: Of the split and the fit.
        setting: ``rows``, ``trials``, ``members``.
        options: LightGBM's, as the search of ``tuned`` found them; ``tuned`` itself searches.
        num_threads: Of the fit.

    Returns:
        ``score``, ``seconds`` of the fit, ``us_per_row`` of an answer to 1,000 rows, and what the contestant tells.
    """
    is_classifier, load = SETS[name]
    x, y, x_test, y_test = load(name, seed, setting["rows"], 5 * setting["rows"])
    facts: dict[str, Any] = {"rows": len(y), "test_rows": len(y_test)}
    started = time.perf_counter()
    if contestant in PEERS:
        model = _fit_peer(contestant, x, y, seed, num_threads, is_classifier=is_classifier)
    else:
        pipeline = make_pipeline_of(x, 100, seed, num_threads, is_classifier=is_classifier)
        if contestant == "tuned":
            options = tuned_booster(pipeline, x, y, trials=setting["trials"], seed=seed, is_classifier=is_classifier)
            facts["options"] = dict(options)
        pipeline[-1].set_params(**options)
        if contestant == "tuned":
            model = pipeline.fit(x, y)
        else:
            model = _fine_tuned(contestant, pipeline, x, y, seed, setting, num_threads, is_classifier=is_classifier)
            facts["epochs"], facts["gain"] = int(model.best_epoch_), _numbers(model.gain_, model.gain_se_)
            facts["nbytes"] = sum(part.nbytes for part in model.module_.state_dict().values())
        if contestant == "members":
            facts["shares"], facts["members_gain"] = model.shares_, _numbers(*model.members_gain_)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    facts["score"] = _score(model, x_test, y_test, is_classifier=is_classifier)
    facts["us_per_row"] = round(_us_per_row(model, x_test.iloc[:ANSWERED], is_classifier=is_classifier), 3)
    return facts


def _numbers(*values: float) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _fine_tuned(
    contestant: str,
    pipeline: Any,
    x: Any,
    y: Any,
    seed: int,
    setting: Mapping[str, Any],
    num_threads: int,
    *,
    is_classifier: bool,
) -> Any:
    from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor

    make: Any = WindTunnelClassifier if is_classifier else WindTunnelRegressor
    members = setting["members"] if contestant == "members" else 0
    return make(pipeline, random_state=seed, n_threads=num_threads, members=members).fit(x, y)


def _fit_peer(peer: str, x: pd.DataFrame, y: Any, seed: int, num_threads: int, *, is_classifier: bool) -> Any:
    """Fit a peer at its default options; boosted trees stop early on a tenth of the rows, networks as pytabkit does."""
    from sklearn.model_selection import train_test_split

    package, kind = importlib.import_module(PEERS[peer]), "Classifier" if is_classifier else "Regressor"
    if peer in NETWORKS:
        model = getattr(package, NETWORKS[peer] + kind)
        return model(device="cpu", random_state=seed, n_threads=num_threads, verbosity=0).fit(x, y)
    words = [column for column in x.columns if x[column].dtype.kind not in "biuf"]
    fitted = x.astype(dict.fromkeys(words, "category" if peer == "XGBoost" else str))
    labels = y if is_classifier else None
    kept, held, y_kept, y_held = train_test_split(fitted, y, test_size=HELD_OUT, random_state=seed, stratify=labels)
    if peer == "XGBoost":
        options: dict[str, Any] = {"n_estimators": ROUNDS, "early_stopping_rounds": PATIENCE, "n_jobs": num_threads}
        options |= {"enable_categorical": True, "random_state": seed}
    else:
        options = {"iterations": ROUNDS, "early_stopping_rounds": PATIENCE, "thread_count": num_threads}
        options |= {"cat_features": words, "random_seed": seed, "allow_writing_files": False, "verbose": 0}
    model = getattr(package, ("XGB" if peer == "XGBoost" else "CatBoost") + kind)(**options)
    model.fit(kept, y_kept, eval_set=[(held, y_held)], verbose=False)
    return _Typed(model, dict(fitted.dtypes), words)


class _Typed:
    """A peer that reads words as it was fitted on them; unknown ones are missing."""

    def __init__(self, model: Any, dtypes: Mapping[Any, Any], words: list[str]) -> None:
        self.model, self.dtypes, self.words = model, {name: dtypes[name] for name in words}, words

    def predict(self, x: pd.DataFrame) -> Any:
        return self.model.predict(x.astype(self.dtypes))

    def predict_proba(self, x: pd.DataFrame) -> Any:
        return self.model.predict_proba(x.astype(self.dtypes))


def _score(model: Any, x: Any, y: Any, *, is_classifier: bool) -> float:
    from sklearn.metrics import r2_score, roc_auc_score

    return float(roc_auc_score(y, model.predict_proba(x)[:, 1]) if is_classifier else r2_score(y, model.predict(x)))


def _us_per_row(model: Any, x: Any, *, is_classifier: bool) -> float:
    """Return the shortest time of an answer, in microseconds a row."""
    answer = model.predict_proba if is_classifier else model.predict
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        answer(x)
        times.append(time.perf_counter() - started)
    return 1e6 * min(times) / len(x)


MOST_TREES = 400
PATIENCE = 30
GRID: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.02, 0.05, 0.1),
    "num_leaves": (4, 8, 16, 31, 63),
    "min_child_samples": (5, 20, 50, 100),
    "colsample_bytree": (0.3, 0.6, 1.0),
    "subsample": (0.6, 0.8, 1.0),
    "reg_lambda": (0.0, 1.0, 10.0),
}


def tuned_booster(pipeline: Any, x: Any, y: Any, *, trials: int, seed: int, is_classifier: bool) -> dict[str, Any]:
    """Return the options with the lowest loss on three folds, and the number of trees that was best there.

    Args:
        pipeline: Ends in a LightGBM estimator, unfitted.
        x: Raw training rows.
        y: Their targets.
        trials: Options tried; the first are LightGBM's own.
        seed: Seed of folds and search.
        is_classifier: Whether the targets are classes.
    """
    import lightgbm
    import numpy as np
    from sklearn.base import clone
    from sklearn.model_selection import KFold, StratifiedKFold

    rng = np.random.default_rng(seed)
    folds = list((StratifiedKFold if is_classifier else KFold)(3, shuffle=True, random_state=seed).split(x, y))
    parts = []
    for kept, held in folds:
        columns = clone(pipeline[:-1])
        parts.append((columns.fit_transform(x.iloc[kept], y[kept]), y[kept], columns.transform(x.iloc[held]), y[held]))
    found: list[tuple[float, int, dict[str, Any]]] = []
    for trial in range(trials):
        drawn = {name: choices[rng.integers(len(choices))] for name, choices in GRID.items()}
        options = {**drawn, "subsample_freq": 1} if trial else {}
        losses, counts = [], []
        for rows, target, others, truth in parts:
            model = clone(pipeline[-1]).set_params(n_estimators=MOST_TREES, **options)
            stop = lightgbm.early_stopping(PATIENCE, verbose=False)
            model.fit(rows, target, eval_set=[(others, truth)], callbacks=[stop])
            losses.append(next(iter(next(iter(model.best_score_.values())).values())))
            counts.append(model.best_iteration_)
        found.append((float(np.mean(losses)), max(2, int(np.mean(counts))), options))
    _, count, options = min(found, key=lambda each: each[0])
    return {**options, "n_estimators": count}
