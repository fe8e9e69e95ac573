"""The suite ``windtunnel-sets``: the data sets of the experiments, described as in the dissertation's table 5.2."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

    from mlsys_bench.windtunnel.experiments.data import Task

QUICK_SETS = ("adult",)


@dataclass(frozen=True, slots=True)
class Facts:
    """Columns of table 5.2, and two of ours."""

    records: int  # of all parts
    train: int  # records of the training part
    numbers: int  # columns
    categories: int  # columns
    unique: int  # categories in the training part, over all columns
    kept: int  # of these, categories of 25 training rows or more: what Pre1 and Pre2 encode
    positive: float | None  # share of records with a positive label; None: the labels are numbers


def run(context: BenchContext, *, data: tuple[str, ...] = ()) -> Section:
    """Read each data set whole and count.

    Args:
        context: The suite's context; quick reads :data:`QUICK_SETS`.
        data: Sets of the experiments; all, if none are named.

    Raises:
        InvalidInputError: no such data set.
        MissingDependencyError: its file is not here; the message says how to get it.
    """
    from mlsys_bench.windtunnel.experiments.data import DATASETS, load_task

    unknown = set(data) - set(DATASETS)
    if unknown:
        raise InvalidInputError(
            f"{sorted(unknown)[0]!r} is no data set of the experiments; there are {', '.join(DATASETS)}"
        )
    found = {name: facts_of(load_task(name, seed=0)) for name in data or (QUICK_SETS if context.is_quick else DATASETS)}
    rows = [[name, *(str(value) for value in asdict(facts).values())] for name, facts in found.items()]
    columns = ["data", "records", "training", "numbers", "categories", "unique", "of 25 rows", "positive"]
    results = {name: asdict(facts) for name, facts in found.items()}
    return Section("WindTunnel: data sets of the experiments", [Table(columns, rows)], data=results)


def facts_of(task: Task) -> Facts:
    """Count a task's records, columns and categories."""
    from mlsys_bench.windtunnel.experiments.sources import LEAST_COUNT

    parts = (task.train, task.valid, task.test)
    counts = [task.train.frame[name].value_counts().to_numpy() for name in task.words]
    target = np.concatenate([part.target for part in parts])
    return Facts(
        records=len(target),
        train=len(task.train.target),
        numbers=len(task.numbers),
        categories=len(task.words),
        unique=sum(map(len, counts)),
        kept=sum(int((each >= LEAST_COUNT).sum()) for each in counts),
        positive=float(target.mean()) if task.metric == "auc" else None,
    )
