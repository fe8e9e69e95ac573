"""Imputers of text and objects as plain data: they run before the look-ups that read what they fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.host.lookup import is_missing
from mlsys_windtunnel.host.raw_table import is_polars, numbers

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Filler:
    """A fitted ``SimpleImputer`` before a look-up of categories."""

    marker: Cell  # content of a missing cell; NaN stands for all that is NaN
    kept: tuple[int, ...]  # columns that are given on
    values: tuple[Cell, ...]  # what fills each of them
    is_of_numbers: bool  # the source was fitted on numbers
    takes_all_missing: bool = False  # None and pandas' NA are filled as NaN is
    refuses_none: bool = False  # of a source that hands frames on, in which None becomes NaN if a text stands beside it

    def transform(self, table: Any) -> npt.NDArray[Any]:
        """Return the kept columns without missing cells, ``[rows, kept]``: float64, or objects.

        Raises:
            InvalidInputError: cells are missing otherwise than the source was fitted for, or infinite.
        """
        if hasattr(table, "toarray"):
            raise InvalidInputError("Sparse data was passed to an imputer of objects: pass X.toarray()")
        cells = _cells(table)
        if self.is_of_numbers:
            cells = numbers(cells if cells.dtype != object else table, "the imputer's input")
        if cells.dtype.kind == "f" and np.isinf(cells).any():
            raise InvalidInputError("Input X contains infinity, which SimpleImputer refuses; drop those rows")
        if cells.dtype.kind not in "iufO":
            raise InvalidInputError(f"SimpleImputer does not support data with dtype {cells.dtype}; give objects")
        gaps = np.frompyfunc(self._is_gap, 1, 1)(cells).astype(bool)
        made = cells[:, list(self.kept)].astype(np.float64 if self.is_of_numbers else object)
        for index, (column, value) in enumerate(zip(self.kept, self.values, strict=True)):
            made[gaps[:, column], index] = value
        if self.refuses_none and not self.is_of_numbers and any(cell is None for cell in made.flat):
            raise InvalidInputError(
                "the input holds None, which the source's imputer does not fill and, in the frame that it hands on, "
                "pandas takes for NaN or not by the other rows: pass NaN where a text is missing"
            )
        return made

    def _is_gap(self, cell: Any) -> bool:
        if is_missing(self.marker):
            if type(cell).__name__ == "NAType" and not self.takes_all_missing:
                raise InvalidInputError("the input holds pandas' NA, where NaN stands for what is missing")
            return is_missing(cell) or (self.takes_all_missing and cell is None)
        if is_missing(cell):
            raise InvalidInputError(
                f"Input X contains NaN, where SimpleImputer takes {self.marker!r} for what is missing"
            )
        return bool(cell == self.marker)


def _cells(table: Any) -> npt.NDArray[Any]:
    """Return cells as the source sees them: numbers where all columns hold numbers, else objects."""
    if is_polars(table):
        table = table.to_numpy()
    cells = np.asarray(table)
    return cells.astype(object) if cells.dtype.kind in "USb" else cells
