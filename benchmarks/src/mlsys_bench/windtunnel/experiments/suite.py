"""The suite ``windtunnel-tables``: flights (dissertation, section 5.4), a pipeline translated and trained as a whole.

Everybody gets the same rows and columns. A *cell* is one fit: a model with one seed, a line of a journal, so that a
restart goes on. A model that has several candidates of options runs them all with the first seed; the one that
validates best runs with the others.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table

from mlsys_bench.harness.journal import Journal
from mlsys_bench.windtunnel.experiments.data import Part, Sizes, Task, load_task
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE
from mlsys_bench.windtunnel.experiments.sources import code_task, make_source

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

BLOCK_ROWS = 4096  # answered at once: the leaves of 100 trees are a table of 6,400 columns
QUICK_ROWS = 8_000

# How a translation is trained, and the options that validation chooses between. Trees of counts overfit: every step on
# the training rows harms, unless leaves decay meanwhile. L4's options were searched for on the validation rows of two
# seeds.
_L1 = tuple(
    {"lr": 1e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": decay} for decay in (3, 10)
)
_L4 = ({"lr": 2e-3, "batch_size": 2048, "init": "source", "temperature": 0.02, "leaf_decay": 12, "ema": 0.98},)
TRANSLATIONS: dict[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]] = {
    "leaves": ({"level": "L1", "scope": "trees"}, _L1),
    "gbdt2nn": ({"level": "L4", "scope": "trees"}, _L4),
    "windtunnel": ({"level": "L4"}, _L4),
}
MODELS = ("source", *TRANSLATIONS, *OUTSIDE)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all cells of a run share."""

    sizes: Sizes
    epochs: int  # of every translation
    num_trees: int
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One fit."""

    model: str
    seed: int
    candidate: int = 0

    @property
    def key(self) -> str:
        """Name in the journal."""
        pipe = "-" if self.model in OUTSIDE else "pipe2"
        return f"flights-3m/pre4/{pipe}/{self.model}/1/candidate{self.candidate}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a cell; a line of the journal."""

    cell: str
    valid: float  # AUC
    test: float
    seconds: float
    rows: int  # trained on
    note: Mapping[str, Any]


def run(
    context: BenchContext,
    *,
    only: tuple[str, ...] = (),
    seeds: int = 5,
    rows: int = 300_000,
    valid_rows: int = 60_000,
    test_rows: int = 150_000,
    epochs: int = 2,
    trees: int = 100,
    journal: str = "windtunnel-tables",
) -> Section:
    """Run what the journal lacks, and report all that it has; stopped by Ctrl-C, report what there is.

    Args:
        context: The suite's context; quick has 8,000 rows, 20 trees, 2 seeds and the first candidate alone.
        only: Names in :data:`MODELS`; none: all. Those whose package is not installed are named.
        seeds: 0, 1, ...; the first chooses between candidates.
        rows: Training rows.
        valid_rows: Validation rows.
        test_rows: Test rows.
        epochs: Of every translation.
        trees: Of LightGBM within the source; the paper has 100.
        journal: Name of the file of finished fits, ``JOURNAL.jsonl`` in the context's folder; of quick runs
            ``JOURNAL-quick.jsonl``.

    Raises:
        InvalidInputError: a name is unknown, or the journal is of another setting.
    """
    import torch

    if unknown := [name for name in only if name not in MODELS]:
        raise InvalidInputError(f"only={unknown[0]}: there are {', '.join(MODELS)}")
    setting = Setting(Sizes(rows, valid_rows, test_rows), epochs, trees)
    if context.is_quick:
        setting = Setting(Sizes(QUICK_ROWS, QUICK_ROWS, QUICK_ROWS), epochs, min(trees, 20), is_quick=True)
        seeds, journal = min(seeds, 2), f"{journal}-quick"
    absent = missing_packages(only or MODELS)
    models = [name for name in only or MODELS if name not in absent]
    finished = open_journal(context.output_dir / f"{journal}.jsonl", setting)
    torch.set_num_threads(context.num_threads)
    with suppress(KeyboardInterrupt), context.console.status("starting") as status:
        for seed in range(seeds):
            for model in models:
                for cell in [chosen(model, seed, results_of(finished), setting)] if seed else tried(model, setting):
                    if cell is not None and cell.key not in finished.finished:
                        status.update(cell.key)
                        with warnings.catch_warnings(action="ignore"):
                            result = run_cell(cell, setting, num_threads=context.num_threads)
                        finished.add(asdict(result))
                        scores = f"valid {result.valid:.4f}, test {result.test:.4f}, {result.seconds:.0f} s"
                        context.console.print(f"{result.cell} {scores}", highlight=False)
    return report(models, range(seeds), results_of(finished), setting, absent=absent)


def missing_packages(models: Sequence[str]) -> dict[str, str]:
    """Return the outside models among ``models`` whose package is not installed, with its name."""
    packages = {model: OUTSIDE[model].package for model in models if model in OUTSIDE}
    return {model: name for model, name in packages.items() if name and importlib.util.find_spec(name) is None}


def candidates(model: str) -> Sequence[Mapping[str, Any]]:
    """Return the sets of options that a model chooses between by validation."""
    if model in OUTSIDE:
        return OUTSIDE[model].candidates
    return TRANSLATIONS[model][1] if model in TRANSLATIONS else ({},)


def tried(model: str, setting: Setting) -> list[Cell]:
    """Return the cells of a model's first seed, one for each candidate."""
    return [Cell(model, 0, index) for index in range(1 if setting.is_quick else len(candidates(model)))]


def chosen(model: str, seed: int, finished: Mapping[str, Result], setting: Setting) -> Cell | None:
    """Return a seed's cell with the candidate that validated best with the first; None if that has none finished."""
    known = [cell for cell in tried(model, setting) if cell.key in finished]
    best = max(known, key=lambda cell: finished[cell.key].valid, default=None)
    return None if best is None else replace(best, seed=seed)


def open_journal(path: Path, setting: Setting) -> Journal:
    """Return the journal of a setting's cells, begun or resumed.

    Raises:
        InvalidInputError: the file was written with another setting, or is no journal.
    """
    journal = Journal(path, asdict(setting), key="cell")
    results_of(journal)
    return journal


def results_of(journal: Journal) -> dict[str, Result]:
    """Return the finished cells of a journal by name.

    Raises:
        InvalidInputError: a record is none of a cell.
    """
    try:
        return {cell: Result(**record) for cell, record in journal.finished.items()}
    except TypeError as error:
        raise InvalidInputError(f"{journal.path} is no journal of these experiments: {error}") from error


def run_cell(cell: Cell, setting: Setting, *, num_threads: int) -> Result:
    """Fit one cell and score it on validation and test rows."""
    from sklearn.metrics import roc_auc_score

    from mlsys_bench.windtunnel.experiments.nearby import with_counts

    task = _task(cell.seed, setting.sizes)
    started = time.perf_counter()
    note: dict[str, Any] = {}
    if cell.model in OUTSIDE:
        options = candidates(cell.model)[cell.candidate]
        coded = code_task(with_counts(task))
        valid, test = OUTSIDE[cell.model].fit(coded, options, seed=cell.seed, num_threads=num_threads)
        note = {"options": dict(options)}
    else:
        model = _source(cell.seed, setting.sizes, setting.num_trees, num_threads)
        if cell.model != "source":
            model, note = _translated(model, task, cell, setting, num_threads)
        valid, test = (answers(model, part) for part in (task.valid, task.test))
    return Result(
        cell=cell.key,
        valid=float(roc_auc_score(task.valid.target, valid)),
        test=float(roc_auc_score(task.test.target, test)),
        seconds=round(time.perf_counter() - started, 1),
        rows=len(task.train.target),
        note=note,
    )


def _translated(source: Any, task: Task, cell: Cell, setting: Setting, num_threads: int) -> tuple[Any, dict[str, Any]]:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.tune import fine_tune

    from mlsys_bench.windtunnel.experiments.nearby import registry

    options = {**TRANSLATIONS[cell.model][0], **candidates(cell.model)[cell.candidate]}
    tuned = fine_tune(
        translate(source, registry=registry()),
        task.train.frame,
        task.train.target.astype(np.int64),
        eval_set=(task.valid.frame, task.valid.target.astype(np.int64)),
        epochs=setting.epochs,
        random_state=cell.seed,
        n_threads=num_threads,
        **options,
        keeps_interrupted=False,
    )
    return tuned.module, {
        "options": options,
        "best_epoch": tuned.best_epoch,
        "gain": [round(tuned.gain, 6), round(tuned.gain_se, 6)] if math.isfinite(tuned.gain) else None,
        "valid_by_epoch": [round(epoch["valid_score"], 5) for epoch in tuned.history],
        "seconds_by_epoch": [round(epoch["seconds"], 1) for epoch in tuned.history],
    }


def answers(model: Any, part: Part) -> Any:
    """Return probabilities of the second class, ``[rows]``."""
    blocks = (part.frame.iloc[at : at + BLOCK_ROWS] for at in range(0, len(part.frame), BLOCK_ROWS))
    return np.concatenate([model.predict_proba(block)[:, 1] for block in blocks])


@lru_cache(maxsize=1)
def _task(seed: int, sizes: Sizes) -> Task:
    return load_task("flights-3m", seed=seed, sizes=sizes)


@lru_cache(maxsize=1)
def _source(seed: int, sizes: Sizes, num_trees: int, num_threads: int) -> Any:
    """Return the fitted source; neighbouring cells share it."""
    task = _task(seed, sizes)
    source = make_source(task, seed=seed, num_threads=num_threads, num_trees=num_trees)
    return source.fit(task.train.frame, task.train.target.astype(np.int64))


def report(
    models: Sequence[str],
    seeds: Sequence[int],
    finished: Mapping[str, Result],
    setting: Setting,
    *,
    absent: Mapping[str, str],
) -> Section:
    """Return the table of the finished cells: means over seeds, and differences from the source's with the same."""
    tests = {
        model: {
            seed: finished[cell.key].test
            for seed in seeds
            if (cell := chosen(model, seed, finished, setting)) and cell.key in finished
        }
        for model in models
    }
    lines = []
    for model, scores in tests.items():
        values = np.array(list(scores.values()))
        error = f"{values.std(ddof=1) / np.sqrt(len(values)):.4f}" if len(values) > 1 else ""
        gains = [score - base for seed, score in scores.items() if (base := tests.get("source", {}).get(seed))]
        shown = [f"{values.mean():.4f}", error, str(len(values))] if len(values) else ["not run", "", "0"]
        lines.append([model, *shown, f"{np.mean(gains):+.4f}" if gains and model != "source" else ""])
    sizes = setting.sizes
    body: list[str | Table] = [
        f"AUC on test rows, mean and standard error over {len(seeds)} seeds. flights-3m: {sizes.train:,} training, "
        f"{sizes.valid:,} validation and {sizes.test:,} test rows; whether a flight is late is predicted from what is "
        f"known at take-off. Translations have {setting.epochs} epochs, the source {setting.num_trees} trees.",
        Table(["model", "test", "s.e.", "seeds", "over source"], lines),
    ]
    body += [f"{model} is not installed (pip install {package})." for model, package in absent.items()]
    data = {"setting": asdict(setting), "seeds": list(seeds), "test": tests}
    return Section("WindTunnel: flights, translated and trained", body, data=data)
