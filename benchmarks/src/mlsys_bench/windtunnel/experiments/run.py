"""Cells run one after another; the journal has those that are finished, so that a restart goes on."""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_bench.harness.journal import Journal
from mlsys_bench.windtunnel.experiments.data import Part, Task, load_task
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE, Budget
from mlsys_bench.windtunnel.experiments.plan import PRES, Cell, NumCandidates, Result, Row, Setting, next_cells
from mlsys_bench.windtunnel.experiments.sources import code_task, encode_task, make_source

BLOCK_ROWS = 4096  # answered at once: the leaves of 100 trees are a table of 6,400 columns


def candidates(row: Row) -> Sequence[Mapping[str, Any]]:
    """Return the sets of options that a row's model chooses between by validation."""
    if row.model in OUTSIDE:
        return OUTSIDE[row.model].candidates
    return TRANSLATIONS[row.model].candidates(row.dataset, row.pre) if row.model in TRANSLATIONS else ({},)


def counter(setting: Setting) -> NumCandidates:
    """Return a function that counts the candidates of a row: the first alone when quick."""
    return lambda row: 1 if setting.is_quick else len(candidates(row))


def open_journal(path: Path, setting: Setting) -> Journal:
    """Return the journal of a setting's cells, begun or resumed.

    Raises:
        InvalidInputError: the file was written with another setting, or is no journal.
    """
    journal = Journal(path, asdict(setting), key="cell")
    finished_of(journal)
    return journal


def finished_of(journal: Journal) -> dict[str, Result]:
    """Return the finished cells of a journal by name.

    Raises:
        InvalidInputError: a record is none of a cell.
    """
    try:
        return {cell: Result(**record) for cell, record in journal.finished.items()}
    except TypeError as error:
        raise InvalidInputError(f"{journal.path} is no journal of these experiments: {error}") from error


def missing_packages(rows: Sequence[Row]) -> dict[str, str]:
    """Return the outside models among the rows whose package is not installed, with its name."""
    wanted = {row.model: OUTSIDE[row.model].package for row in rows if row.model in OUTSIDE}
    return {
        model: package
        for model, package in wanted.items()
        if package is not None and importlib.util.find_spec(package) is None
    }


def run_cells(
    rows: Sequence[Row],
    seeds: Sequence[int],
    journal: Journal,
    setting: Setting,
    *,
    num_threads: int,
    on_cell: Callable[[Cell, int], None] | None = None,
) -> Iterator[Result]:
    """Run what the journal lacks; each result is in the journal before it is given.

    Args:
        rows: See :func:`~.plan.next_cells`; rows of packages that are not installed are passed over.
        seeds: Likewise.
        journal: Is added to.
        setting: See :class:`Setting`.
        num_threads: Threads of each fit.
        on_cell: Called with a cell before it runs, and how many are known to be left after it.
    """
    import torch

    absent = missing_packages(rows)
    rows = [row for row in rows if row.model not in absent]
    torch.set_num_threads(num_threads)
    while cells := next_cells(rows, seeds, finished_of(journal), counter(setting)):
        if on_cell is not None:
            on_cell(cells[0], len(cells) - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run_cell(cells[0], setting, num_threads=num_threads)
        journal.add(asdict(result))
        yield result


def run_cell(cell: Cell, setting: Setting, *, num_threads: int) -> Result:
    """Fit one cell and score it on validation and test rows."""
    row = cell.row
    sizes = setting.sizes if row.dataset == "flights-3m" or setting.is_quick else None
    task = _task(row.dataset, cell.seed, sizes, row.fraction)
    started = time.perf_counter()
    note: dict[str, Any] = {}
    if row.model in OUTSIDE:
        options = candidates(row)[cell.candidate]
        budget = Budget(setting.epochs, num_threads, cell.seed, setting.num_trees)
        coded = encode_task(task, row.pre) if row.pre in PRES else code_task(outside_columns(task, row.pre))
        valid, test = OUTSIDE[row.model].fit(coded, options, budget)
        note = {"options": dict(options)}
    else:
        source = _source(row.dataset, cell.seed, sizes, row.fraction, row.pre, row.pipe, setting.num_trees, num_threads)
        if row.model == "source":
            valid, test = (answers(source, part, task.metric) for part in (task.valid, task.test))
        else:
            valid, test, note = _translated(source, task, cell, setting, num_threads)
    return Result(
        cell=cell.key,
        valid=score(task.metric, task.valid, valid),
        test=score(task.metric, task.test, test),
        seconds=round(time.perf_counter() - started, 1),
        rows=len(task.train.target),
        note=note,
    )


def outside_columns(task: Task, pre: str) -> Task:
    """Return the columns for an outside model: as they are, or with counts beside them.

    ``pre4`` adds the counts; ``pre5`` adds them and leaves the date out.
    """
    from mlsys_bench.windtunnel.experiments.nearby import undated, with_counts

    if pre == "pre5":
        return outside_columns(undated(task), "pre4")
    return with_counts(task) if pre == "pre4" else task


def _translated(
    source: Any, task: Task, cell: Cell, setting: Setting, num_threads: int
) -> tuple[Any, Any, dict[str, Any]]:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.tune import fine_tune

    from mlsys_bench.windtunnel.experiments.nearby import registry

    translation = TRANSLATIONS[cell.row.model]
    options = candidates(cell.row)[cell.candidate]
    target, valid_target = (
        part.target if task.metric == "rmse" else part.target.astype(np.int64) for part in (task.train, task.valid)
    )
    tuned = fine_tune(
        translate(source, registry=registry()),
        task.train.frame,
        target,
        eval_set=(task.valid.frame, valid_target),
        epochs=setting.epochs,
        random_state=cell.seed,
        n_threads=num_threads,
        **translation.options,
        **options,
        keeps_interrupted=False,
    )
    note = {
        "options": {**translation.options, **options},
        "best_epoch": tuned.best_epoch,
        "gain": [round(tuned.gain, 6), round(tuned.gain_se, 6)] if math.isfinite(tuned.gain) else None,
        "valid_by_epoch": [round(epoch["valid_score"], 5) for epoch in tuned.history],
        "seconds_by_epoch": [round(epoch["seconds"], 1) for epoch in tuned.history],
    }
    valid, test = (answers(tuned.module, part, task.metric) for part in (task.valid, task.test))
    return valid, test, note


def answers(model: Any, part: Part, metric: str) -> Any:
    """Return probabilities of the second class, or ratings, ``[rows]``."""
    blocks = (part.frame.iloc[at : at + BLOCK_ROWS] for at in range(0, len(part.frame), BLOCK_ROWS))
    if metric == "rmse":
        return np.concatenate([model.predict(block) for block in blocks])
    return np.concatenate([model.predict_proba(block)[:, 1] for block in blocks])


def score(metric: str, part: Part, answer: Any) -> float:
    """Return the AUC, or the root of the mean squared error."""
    from sklearn.metrics import roc_auc_score

    if metric == "rmse":
        return float(np.sqrt(np.mean((np.asarray(answer) - part.target) ** 2)))
    return float(roc_auc_score(part.target, answer))


@lru_cache(maxsize=1)
def _task(dataset: str, seed: int, sizes: Any, fraction: float) -> Task:
    return load_task(dataset, seed=seed, sizes=sizes, fraction=fraction)


@lru_cache(maxsize=2)
def _source(
    dataset: str, seed: int, sizes: Any, fraction: float, pre: Any, pipe: Any, num_trees: int, num_threads: int
) -> Any:
    """Return the fitted source; neighbouring cells share it."""
    task = _task(dataset, seed, sizes, fraction)
    source = make_source(task, pre, pipe, seed=seed, num_threads=num_threads, num_trees=num_trees)
    target = task.train.target if task.metric == "rmse" else task.train.target.astype(np.int64)
    return source.fit(task.train.frame, target)


def best_of(results: Mapping[int, Result]) -> tuple[float, float | None]:
    """Return mean and standard error of the test scores over seeds; the latter needs two."""
    values = np.array([result.test for result in results.values()])
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error


# Options of a fine-tuned translation, from which validation chooses. Those of the flights were chosen before, with 40
# trees of 32 leaves, by their validation rows (docs/windtunnel-experiments.md).
RATES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "flights-3m": ({"lr": 2e-3, "batch_size": 2048, "init": "source", "temperature": 0.05},),
    # Trees of counts overfit: every step on the training rows harms, unless leaves decay meanwhile.
    # L4's options were searched for on the validation rows of two seeds.
    "flights-3m/pre4/L1": tuple(
        {"lr": 1e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": decay}
        for decay in (3, 10)
    ),
    "flights-3m/pre4/L4": (
        {"lr": 2e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": 12, "ema": 0.98},
    ),
    # few rows, and gains of hundredths of a point: the best of four epochs is often above the source by chance
    "adult": tuple({"lr": rate, "batch_size": 512, "min_gain_se": 2.0} for rate in (5e-4, 2e-3, 2e-4)),
    "nycflights13": ({"lr": 5e-4}, {"lr": 2e-3}, {"lr": 2e-4}),
    # a one-hot table of 1,700 films is 1,700 wide: at the usual rate each step would move a row far
    "movielens-100k": tuple(
        {"lr": rate, "embedding_rate": times} for rate, times in ((1e-3, 1), (1e-4, 1), (1e-4, 0.1))
    ),
}
COLD_RATES: tuple[Mapping[str, Any], ...] = ({"lr": 3e-3}, {"lr": 1e-2}, {"lr": 1e-3})


@dataclass(frozen=True, slots=True)
class Translation:
    """A way to train a translated source further."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of soft mode, as fine_tune takes them
    is_cold: bool = False

    def candidates(self, dataset: str, pre: str) -> tuple[Mapping[str, Any], ...]:
        """Return options to choose between by validation."""
        if self.is_cold:
            return COLD_RATES
        counted = "pre4" if pre == "pre5" else pre  # what was searched for with counts
        return RATES.get(f"{dataset}/{counted}/{self.options['level']}", RATES[dataset])


TRANSLATIONS: dict[str, Translation] = {
    "windtunnel": Translation({"level": "L4"}),
    "L1": Translation({"level": "L1"}),
    "L2": Translation({"level": "L2"}),
    "L3": Translation({"level": "L3"}),
    "gbdt2nn": Translation({"level": "L4", "scope": "trees"}),
    "leaves": Translation({"level": "L1", "scope": "trees"}),
    "cold": Translation({"level": "L4", "init": "random", "temperature": 1.0}, is_cold=True),
}
