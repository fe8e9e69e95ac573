"""The source pipeline (section 5.4.1), and its columns as codes for models that are no translation.

Categories are coded by two hot elements, without those that come fewer than 25 times; numbers are standardised, which
trees do not mind. Beside them is how many training rows are near a row (:mod:`.nearby`), which the dissertation has
not. Behind stands LightGBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlsys_bench.windtunnel.experiments.data import Part, Task

if TYPE_CHECKING:
    import pandas as pd

LEAST_CODED = 5  # training rows of a category with a code of its own; rarer ones have code 0, as unseen ones


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows of one part."""

    numbers: npt.NDArray[np.float64]  # [rows, numbers]
    codes: npt.NDArray[np.int64]  # [rows, words]; 0 for unseen and rare categories
    target: npt.NDArray[np.float64]  # [rows]


@dataclass(frozen=True, slots=True)
class CodedTask:
    """All parts, coded alike."""

    train: Coded
    valid: Coded
    test: Coded
    cardinalities: tuple[int, ...]  # of each column of codes, 0 included


def code_task(task: Task) -> CodedTask:
    """Code a task by its training rows."""
    vocabularies = []
    for name in task.words:
        counts = task.train.frame[name].value_counts()
        kept = sorted(counts.index[counts >= LEAST_CODED])
        vocabularies.append({category: code for code, category in enumerate(kept, start=1)})

    def coded(part: Part) -> Coded:
        columns = [
            part.frame[name].map(vocabulary).fillna(0).to_numpy(np.int64)
            for name, vocabulary in zip(task.words, vocabularies, strict=True)
        ]
        codes = np.stack(columns, axis=1) if columns else np.zeros((len(part.frame), 0), np.int64)
        return Coded(part.frame[list(task.numbers)].to_numpy(np.float64), codes, part.target)

    sizes = tuple(len(vocabulary) + 1 for vocabulary in vocabularies)
    return CodedTask(coded(task.train), coded(task.valid), coded(task.test), sizes)


def frame_of(part: Coded, task: CodedTask, kind: str) -> pd.DataFrame:
    """Return numbers ``number0``, ... and codes ``word0``, ...; codes as pandas categories or integers."""
    import pandas as pd

    columns: dict[str, Any] = {f"number{index}": column for index, column in enumerate(part.numbers.T)}
    for index, size in enumerate(task.cardinalities):
        codes = part.codes[:, index]
        columns[f"word{index}"] = pd.Categorical(codes, categories=range(size)) if kind == "category" else codes
    return pd.DataFrame(columns)


NUM_LEAVES, BOOSTING_RATE = 64, 0.25
LEAST_COUNT = 25


def make_source(task: Task, *, seed: int, num_threads: int, num_trees: int) -> Any:
    """Make an unfitted scikit-learn pipeline of the task's columns and LightGBM."""
    from lightgbm import LGBMClassifier
    from sklearn.pipeline import make_pipeline

    trees = LGBMClassifier(
        n_estimators=num_trees,
        num_leaves=NUM_LEAVES,
        learning_rate=BOOSTING_RATE,
        n_jobs=num_threads,
        random_state=seed,
        verbose=-1,
    )
    return make_pipeline(make_columns(task), trees)


def make_columns(task: Task) -> Any:
    """Make the column transformer of the source."""
    from mlsys_windtunnel.estimators import TwoHotEncoder
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import StandardScaler

    from mlsys_bench.windtunnel.experiments.nearby import nearby_steps

    words = ("words", TwoHotEncoder(min_frequency=LEAST_COUNT), list(task.words))
    return ColumnTransformer([("numbers", StandardScaler(), list(task.numbers)), words, *nearby_steps()])
