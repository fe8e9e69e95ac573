"""The source pipelines of section 5.4.1: ways to prepare columns, and three models behind them.

Pre1 encodes categories in binary digits, Pre2 by two hot elements; both leave out those that come fewer than 25 times.
Pre3 leaves out the rarest that hold a hundredth of the rows together and those below 10, adds each number's bin of 32
as a category, and gives each category its mean of the target beside its two-hot code. Numbers are standardised
throughout, which trees do not mind. Pre4, which the dissertation has not, is Pre2 and how many training rows are near
a row (:mod:`.nearby`), for data sets of which it says what near means; Pre5 is Pre4 without the columns that tell a
training row's date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

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
    is_encoded: bool = False  # the numbers hold the categories, too: trees read these alone


def code_task(task: Task, least: Mapping[str, int] | None = None) -> CodedTask:
    """Code a task by its training rows.

    Args:
        task: The columns and targets.
        least: Training rows that a category needs for a code of its own, by column; :data:`LEAST_CODED` where none is
            given.
    """
    least = least or {}
    vocabularies = []
    for name in task.words:
        counts = task.train.frame[name].value_counts()
        kept = sorted(counts.index[counts >= least.get(name, LEAST_CODED)])
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


def encode_task(task: Task, pre: str) -> CodedTask:
    """Code a task whose numbers are a preparation's columns: binary digits, two hot elements, means of the target.

    The categories that the preparation keeps are coded beside them.

    Args:
        task: The columns and targets.
        pre: ``pre1``, ``pre2`` or ``pre3``; fitted on the training rows, whose means of the target are cross-fitted.
    """
    columns = make_columns(task, pre)
    target = task.train.target.astype(np.int64)
    numbers = [columns.fit_transform(task.train.frame, target)]
    numbers += [columns.transform(part.frame) for part in (task.valid, task.test)]
    coded = code_task(task, least_counts(task, pre))
    parts = zip((coded.train, coded.valid, coded.test), numbers, strict=True)
    train, valid, test = (replace(part, numbers=np.asarray(table, np.float64)) for part, table in parts)
    return CodedTask(train, valid, test, coded.cardinalities, is_encoded=True)


Pre = Literal["pre1", "pre2", "pre3", "pre4", "pre5"]
Pipe = Literal["pipe1", "pipe2", "pipe3", "mf", "fm"]

NUM_TREES, NUM_LEAVES, BOOSTING_RATE = 100, 64, 0.25
NUM_FACTORS = 20
LEAST_COUNT, LEAST_COUNT_PRE3, RARE_SHARE = 25, 10, 0.01
NUM_BINS = 32


def make_source(task: Task, pre: str, pipe: str, *, seed: int, num_threads: int, num_trees: int = NUM_TREES) -> Any:
    """Make an unfitted scikit-learn pipeline.

    Args:
        task: Task with the columns; Pre3 looks at the training rows to tell which categories are rare.
        pre: Preparation of columns; films' raters (``mf``, ``fm``) have nothing to prepare and ignore it.
        pipe: ``pipe1`` logistic regression; ``pipe2`` LightGBM, 100 trees of 64 leaves at rate 0.25; ``pipe3`` a
            factorisation machine of the leaves of such trees, 20 factors; ``mf`` matrix factorisation and ``fm`` a
            factorisation machine of one-hot ids, both for ratings.
        seed: Seed of the models.
        num_threads: Threads of LightGBM.
        num_trees: Trees of LightGBM.

    Raises:
        InvalidInputError: no such preparation or model.
    """
    from mlsys_windtunnel.estimators import FactorizationMachineRegressor, MatrixFactorizationRegressor
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    if pipe not in get_args(Pipe) or (pipe.startswith("pipe") and pre not in get_args(Pre)):
        raise InvalidInputError(f"{pre}/{pipe} is none of {get_args(Pre)} with one of {get_args(Pipe)}")
    if pipe == "mf":
        return MatrixFactorizationRegressor(NUM_FACTORS, max_iter=30, alpha=1e-4, random_state=seed)
    if pipe == "fm":
        machine = FactorizationMachineRegressor(NUM_FACTORS, learning_rate=1e-3, max_iter=30, random_state=seed)
        return make_pipeline(OneHotEncoder(handle_unknown="ignore"), machine)
    columns = make_columns(task, pre)
    if pipe == "pipe1":
        return make_pipeline(columns, LogisticRegression(max_iter=1000))
    trees = make_trees(seed=seed, num_threads=num_threads, num_trees=num_trees)
    return make_pipeline(columns, trees) if pipe == "pipe2" else make_pipeline(columns, *_leaves(trees, seed))


def make_trees(*, seed: int, num_threads: int, num_trees: int = NUM_TREES) -> Any:
    """Make LightGBM as Pipe2 has it."""
    from lightgbm import LGBMClassifier

    return LGBMClassifier(
        n_estimators=num_trees,
        num_leaves=NUM_LEAVES,
        learning_rate=BOOSTING_RATE,
        n_jobs=num_threads,
        random_state=seed,
        verbose=-1,
    )


def make_columns(task: Task, pre: str) -> Any:
    """Make the column transformer of a preparation."""
    from mlsys_windtunnel.estimators import BinaryEncoder, TwoHotEncoder
    from sklearn.compose import ColumnTransformer
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import KBinsDiscretizer, StandardScaler, TargetEncoder

    from mlsys_bench.windtunnel.experiments.nearby import nearby_steps, undated

    if pre == "pre5":
        return make_columns(undated(task), "pre4")
    numbers, words = list(task.numbers), list(task.words)
    steps: list[tuple[str, Any, list[str]]] = [("numbers", StandardScaler(), numbers)]
    if pre != "pre3":
        encoder = BinaryEncoder if pre == "pre1" else TwoHotEncoder
        steps.append(("words", encoder(min_frequency=LEAST_COUNT), words))
        return ColumnTransformer([*steps, *(nearby_steps(task.name) if pre == "pre4" else ())])
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    bins = KBinsDiscretizer(NUM_BINS, encode="ordinal", quantile_method="averaged_inverted_cdf", subsample=None)
    steps.append(("bins", make_pipeline(bins, TwoHotEncoder(min_frequency=LEAST_COUNT_PRE3)), numbers))
    for name, least in least_counts(task, pre).items():
        steps.append((name, TwoHotEncoder(min_frequency=least), [name]))
    steps.append(("means", TargetEncoder(target_type="binary", cv=folds), words))
    return ColumnTransformer(steps)


def least_counts(task: Task, pre: str) -> dict[str, int]:
    """Return the number of training rows that a preparation asks of a category to keep it, by column of words."""
    if pre != "pre3":
        return dict.fromkeys(task.words, LEAST_COUNT)
    frame = task.train.frame
    return {name: least_count(frame[name], share=RARE_SHARE, least=LEAST_COUNT_PRE3) for name in task.words}


def least_count(column: pd.Series[Any], *, share: float, least: int) -> int:
    """Return the least count that keeps a category, such that rarer ones hold at most ``share`` of the rows together.

    Example:
        >>> import pandas as pd
        >>> least_count(pd.Series(["a"] * 90 + ["b"] * 8 + ["c"] * 2), share=0.05, least=1)
        3
    """
    counts = np.sort(column.value_counts().to_numpy())
    num_rare = int(np.searchsorted(np.cumsum(counts), share * len(column), side="right"))
    # categories that come equally often are kept or left out together: the last rare one decides
    bound = int(counts[num_rare - 1]) + 1 if num_rare else 1
    if num_rare and num_rare < len(counts) and counts[num_rare] < bound:
        bound = int(counts[num_rare])
    return max(least, bound)


def _leaves(trees: Any, seed: int) -> tuple[Any, Any]:
    from mlsys_windtunnel.estimators import FactorizationMachineClassifier, LeafEncoder

    machine = FactorizationMachineClassifier(
        NUM_FACTORS, learning_rate=1e-3, batch_size=1024, max_iter=3, alpha=1e-6, random_state=seed
    )
    return LeafEncoder(trees), machine
