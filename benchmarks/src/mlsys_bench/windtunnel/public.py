"""The suite ``windtunnel-public``: does ``fit`` as it stands ever lose to the pipeline that it begins with?

Eight public sets that packages carry. ``source`` is a LightGBM pipeline fitted on all training rows; ``fine-tuned``
the estimator's default on the same rows; ``held out`` the same without learning from the rows held out afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.experiments.data import DATASETS, Sizes, load_task

if TYPE_CHECKING:
    import pandas as pd
    from mlsys_core.bench import BenchContext

CONTESTANTS = ("source", "fine-tuned", "held out")
SHARE = 0.75  # of the rows of sets without a split of their own that are trained on
Loaded = tuple[Any, Any, Any, Any]  # training rows and targets, test rows and targets


def run(
    context: BenchContext, *, seeds: int = 3, rows: int = 4_000, trees: int = 50, data: tuple[str, ...] = ()
) -> Section:
    """Fit on each set and score other rows: AUC of classes, R2 of numbers.

    Args:
        context: The suite's context; quick has one seed, 600 rows and 5 trees.
        seeds: Splits and draws of rows: 0, 1, ...
        rows: Training rows at most, and test rows at most.
        trees: Trees of the pipeline.
        data: Sets; all if none.
    """
    import numpy as np
    import torch

    unknown = [name for name in data if name not in SETS]
    if unknown:
        raise InvalidInputError(f"{unknown[0]!r} is no public set here; there are {', '.join(SETS)}")
    if context.is_quick:
        seeds, rows, trees = 1, 600, 5
    torch.set_num_threads(context.num_threads)
    found: dict[str, Any] = {}
    table = []
    for name in data or SETS:
        scores: dict[str, list[float]] = {each: [] for each in CONTESTANTS}
        epochs: list[int] = []
        for seed in range(seeds):
            for contestant, (score, kept) in _scores(name, seed, rows, trees, context.num_threads).items():
                scores[contestant].append(score)
                if contestant == "fine-tuned":
                    epochs.append(kept)
        gains = 100 * (np.array(scores["fine-tuned"]) - scores["source"])
        error = float(gains.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None
        found[name] = {"scores": scores, "epochs": epochs, "gain": float(gains.mean()), "gain_se": error}
        means = [f"{np.mean(scores[each]):.4f}" for each in CONTESTANTS]
        cell = f"{gains.mean():+.2f}" + ("" if error is None else f" ± {error:.2f}")
        table.append([name, *means, cell, f"{gains.min():+.2f}", ", ".join(map(str, epochs))])
        context.console.print(f"{name}: {cell} points", highlight=False)
    columns = ["set", *CONTESTANTS, "fine-tuned above source, points", "lowest of a seed", "epochs chosen"]
    caption = f"{seeds} seeds, {rows:,} training rows and {trees} trees at most; AUC, R2 where a number is predicted"
    return Section("WindTunnel: fit as it stands", [Table(columns, table, caption)], data={"results": found})


def _scores(name: str, seed: int, rows: int, trees: int, num_threads: int) -> dict[str, tuple[float, int]]:
    """Return the score of each contestant and the epochs that it trained."""
    import numpy as np
    from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor
    from sklearn.model_selection import train_test_split

    is_classifier, load = SETS[name]
    x, y, x_test, y_test = load(name, seed, rows)
    pipeline = make_pipeline_of(x, trees, seed, num_threads, is_classifier=is_classifier)
    make: Any = WindTunnelClassifier if is_classifier else WindTunnelRegressor
    kept, held = train_test_split(
        np.arange(len(y)), test_size=0.1, random_state=seed, stratify=y if is_classifier else None
    )
    pair = (x.iloc[held], y[held])
    models = {
        "source": pipeline.fit(x, y),
        "fine-tuned": make(pipeline, random_state=seed).fit(x, y),
        "held out": make(pipeline, random_state=seed).fit(x.iloc[kept], y[kept], eval_set=pair),
    }
    return {
        contestant: (_score(model, x_test, y_test, is_classifier=is_classifier), int(getattr(model, "best_epoch_", 0)))
        for contestant, model in models.items()
    }


def _score(model: Any, x: Any, y: Any, *, is_classifier: bool) -> float:
    from sklearn.metrics import r2_score, roc_auc_score

    return float(roc_auc_score(y, model.predict_proba(x)[:, 1]) if is_classifier else r2_score(y, model.predict(x)))


def make_pipeline_of(x: pd.DataFrame, trees: int, seed: int, num_threads: int, *, is_classifier: bool) -> Any:
    """Return a LightGBM pipeline for the columns of ``x``, unfitted: numbers scaled, words one-hot."""
    from lightgbm import LGBMClassifier, LGBMRegressor
    from pandas.api.types import is_numeric_dtype
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = [column for column in x.columns if is_numeric_dtype(x[column])]
    words = [column for column in x.columns if column not in numbers]
    steps = [(StandardScaler(), numbers)] if numbers else []
    if words:
        steps.append((OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5), words))
    booster = LGBMClassifier if is_classifier else LGBMRegressor
    model = booster(n_estimators=trees, num_leaves=31, random_state=seed, verbose=-1, n_jobs=num_threads)
    return make_pipeline(make_column_transformer(*steps), model)


def _task(name: str, seed: int, rows: int) -> Loaded:
    """Load a set of the experiments: flights are split by time."""
    task = load_task(name, seed=seed, sizes=Sizes(train=rows, valid=1, test=rows))
    is_classifier = SETS[name][0]
    targets = [part.target.astype(int) if is_classifier else part.target for part in (task.train, task.test)]
    return task.train.frame, targets[0], task.test.frame, targets[1]


def _table(name: str, seed: int, rows: int) -> Loaded:
    """Load another set, split by chance."""
    import numpy as np

    frame, target = _TABLES[name]()
    order = np.random.default_rng(seed).permutation(len(frame))[: 2 * rows]
    cut = min(rows, int(SHARE * len(order)))
    train, test = order[:cut], order[cut:]
    values = np.asarray(target)
    return (
        frame.iloc[train].reset_index(drop=True),
        values[train],
        frame.iloc[test].reset_index(drop=True),
        values[test],
    )


def _located(name: str) -> Path:
    from mlsys_core.config import settings
    from mlsys_core.models import find_entry

    source = find_entry(name).source
    path: Path | None = source.locate(settings().cache_dir)
    if path is None:
        raise MissingDependencyError(f"{name} is not here: {source.install_command()}")
    return path


def _california() -> tuple[pd.DataFrame, Any]:
    import pandas as pd

    table = pd.read_parquet(_located("california"))
    return table, table.pop("MedHouseVal")


def _proteins() -> tuple[pd.DataFrame, Any]:
    """Load protein homology with one row in ten of those that are none, so that a few thousand rows have some."""
    import pandas as pd

    table = pd.read_parquet(_located("bio-train")).drop(columns=["EXAMPLE_ID", "BLOCK_ID"])
    table = table[(table.target == 1) | (table.index % 10 == 0)].reset_index(drop=True)
    return table, table.pop("target").astype(int)


def _clothing() -> tuple[pd.DataFrame, Any]:
    """Load reviews of clothes without their text: does the reviewer recommend the piece?"""
    import pandas as pd

    path = _located("california").with_name("WomensClothingE-CommerceReviews.parquet.brotli")
    table = pd.read_parquet(path).dropna(subset=["Class Name"])
    target = table["Recommended IND"].astype(int)
    frame = table[["Age", "Positive Feedback Count"]].astype(float)
    words = {name: table[name].astype(object) for name in ("Division Name", "Department Name", "Class Name")}
    frame = frame.assign(**words, length=table["Review Text"].fillna("").str.len().astype(float))
    return frame.reset_index(drop=True), target


def _cancer() -> tuple[pd.DataFrame, Any]:
    from sklearn.datasets import load_breast_cancer

    frame, target = load_breast_cancer(as_frame=True, return_X_y=True)
    return frame, target


_TABLES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "california": _california,
    "bio-train": _proteins,
    "womens-clothing": _clothing,
    "breast-cancer": _cancer,
}
SETS: dict[str, tuple[bool, Callable[[str, int, int], Loaded]]] = {  # whether classes are predicted, and the loader
    **{name: (name != "movielens-100k", _task) for name in DATASETS},
    **{name: (name != "california", _table) for name in _TABLES},
}
