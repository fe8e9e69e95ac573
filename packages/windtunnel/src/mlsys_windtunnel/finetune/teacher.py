"""Probabilities of a teacher in place of labels: a row becomes one row for each class, weighed by its probability.

The log loss is linear in the target, so this is the cross-entropy with the teacher's answer, for any loss of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from sklearn.utils import _safe_indexing

TOLERANCE = 1e-3  # by which probabilities of a row may miss a sum of 1


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher's answers for all training rows."""

    proba: npt.NDArray[np.float64]  # [rows, classes]
    classes: npt.NDArray[Any]  # [classes], ascending

    @classmethod
    def of(cls, proba: Any, y: Any) -> Teacher:
        """Check answers for rows with the labels ``y``.

        Raises:
            InvalidInputError: another shape, or what are no probabilities.
        """
        classes = np.unique(np.asarray(y))
        try:
            table = np.asarray(proba, np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"teacher_proba holds what is no number ({error})") from error
        if table.shape != (len(y), len(classes)):
            raise InvalidInputError(
                f"teacher_proba has shape {list(table.shape)}; [{len(y)} rows, {len(classes)} classes] is needed, the "
                f"columns in the order {classes[:10].tolist()}, as predict_proba gives them"
            )
        if not np.isfinite(table).all() or (table < 0).any() or (np.abs(table.sum(axis=1) - 1) > TOLERANCE).any():
            raise InvalidInputError("teacher_proba must hold probabilities: 0 or more, 1 in the sum of each row")
        return cls(table, classes)

    def part(self, rows: npt.NDArray[np.int64]) -> Teacher:
        """Return the answers for some of the rows."""
        return Teacher(self.proba[rows], self.classes)

    def rows(self, x: Any, weight: Any) -> tuple[Any, npt.NDArray[Any], npt.NDArray[np.float64]]:
        """Return rows, labels and weights that stand for these rows and the teacher's answers."""
        row, column = np.nonzero(self.proba)
        weights = self.proba[row, column] * (1.0 if weight is None else np.asarray(weight)[row])
        return _safe_indexing(x, row), self.classes[column], weights
