"""Eight public sets of the suite ``windtunnel-public``, which packages carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model

from mlsys_bench.windtunnel.experiments.data import DATASETS, Sizes, load_task

if TYPE_CHECKING:
    import pandas as pd

SHARE = 0.75  # of the rows of sets without a split of their own that are trained on
Loaded = tuple[Any, Any, Any, Any]  # training rows and targets, test rows and targets


def check_sets(data: tuple[str, ...]) -> None:
    """Raise InvalidInputError for a name that is no set here."""
    unknown = [name for name in data if name not in SETS]
    if unknown:
        raise InvalidInputError(f"{unknown[0]!r} is no public set here; there are {', '.join(SETS)}")


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


def _task(name: str, seed: int, rows: int, test_rows: int = 0) -> Loaded:
    """Load a set of the experiments: flights are split by time."""
    task = load_task(name, seed=seed, sizes=Sizes(train=rows, valid=1, test=test_rows or rows))
    is_classifier = SETS[name][0]
    targets = [part.target.astype(int) if is_classifier else part.target for part in (task.train, task.test)]
    return task.train.frame, targets[0], task.test.frame, targets[1]


def _table(name: str, seed: int, rows: int, test_rows: int = 0) -> Loaded:
    """Load another set, split by chance."""
    import numpy as np

    frame, target = _TABLES[name]()
    order = np.random.default_rng(seed).permutation(len(frame))[: rows + (test_rows or rows)]
    cut = min(rows, int(SHARE * len(order)))
    train, test = order[:cut], order[cut:]
    values = np.asarray(target)
    return (
        frame.iloc[train].reset_index(drop=True),
        values[train],
        frame.iloc[test].reset_index(drop=True),
        values[test],
    )


def _california() -> tuple[pd.DataFrame, Any]:
    import pandas as pd

    table = pd.read_parquet(resolve_model("california", settings().cache_dir))
    return table, table.pop("MedHouseVal")


def _proteins() -> tuple[pd.DataFrame, Any]:
    """Load protein homology with one row in ten of those that are none, so that a few thousand rows have some."""
    import pandas as pd

    table = pd.read_parquet(resolve_model("bio-train", settings().cache_dir)).drop(columns=["EXAMPLE_ID", "BLOCK_ID"])
    table = table[(table.target == 1) | (table.index % 10 == 0)].reset_index(drop=True)
    return table, table.pop("target").astype(int)


def _clothing() -> tuple[pd.DataFrame, Any]:
    """Load reviews of clothes without their text: does the reviewer recommend the piece?"""
    import pandas as pd

    path = resolve_model("california", settings().cache_dir).with_name("WomensClothingE-CommerceReviews.parquet.brotli")
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
# Whether classes are predicted, and the loader: name, seed, training rows and test rows at most (0: as many).
SETS: dict[str, tuple[bool, Callable[..., Loaded]]] = {
    **{name: (name != "movielens-100k", _task) for name in DATASETS},
    **{name: (name != "california", _table) for name in _TABLES},
}
