"""Inputs of the outside models: numbers, and categories as whole numbers by the training rows' vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlsys_bench.windtunnel.experiments.data import Part, Task

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


def code_task(task: Task) -> CodedTask:
    """Code a task by its training rows."""
    vocabularies = []
    for name in task.words:
        counts = task.train.frame[name].value_counts()
        kept = sorted(counts.index[counts >= LEAST_COUNT])
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
