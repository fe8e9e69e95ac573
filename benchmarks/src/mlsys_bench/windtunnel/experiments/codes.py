"""Inputs of the outside models: numbers, and categories as whole numbers by the training rows' vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlsys_bench.windtunnel.experiments.data import Part, Task
from mlsys_bench.windtunnel.experiments.sources import least_counts, make_columns

LEAST_COUNT = 5  # of a category in the training rows; rarer ones have code 0, as unseen ones


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
        least: Training rows that a category needs for a code of its own, by column; :data:`LEAST_COUNT` where none is
            given.
    """
    least = least or {}
    vocabularies = []
    for name in task.words:
        counts = task.train.frame[name].value_counts()
        kept = sorted(counts.index[counts >= least.get(name, LEAST_COUNT)])
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
