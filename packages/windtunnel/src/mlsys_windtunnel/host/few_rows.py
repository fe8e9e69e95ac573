"""Read a dictionary of a few rows, as a server hands them over: planned once, then a few calls for all columns.

What it does not know (other holders of columns, other dtypes, unknown or missing categories, columns of other lengths)
it leaves to the readers of :mod:`.raw_table`, which answer or refuse; so it never decides what is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.host.lookup import FEW_ROWS, UNKNOWN, CategoryLookup

Floats = npt.NDArray[np.float64]
Column = npt.NDArray[Any]
Reader = Callable[[Sequence[Column], int], Floats | None]  # columns, rows -> [rows, columns]; None: left to others

_SHAPE = attrgetter("shape")
_ARRAYS = {np.ndarray}


class FewRows:
    """Reader of the frontier's tables.

    Args:
        parts: For each table the names of its columns, and the look-up of their categories or None for numbers.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[str], CategoryLookup | None]]) -> None:
        names = [name for columns, _ in parts for name in columns]
        self._columns: Callable[[Any], Sequence[Column]] = itemgetter(*names)
        self._is_single = len(names) == 1
        ends = np.cumsum([len(columns) for columns, _ in parts]).tolist()
        readers = [_numbers if lookup is None else _codes_of(lookup) for _, lookup in parts]
        self._readers = list(zip([0, *ends[:-1]], ends, readers, strict=True))

    def __call__(self, x: Mapping[str, Any]) -> list[Floats] | None:
        """Return the tables, ``[rows, width]`` float64 each; None where another reader has to."""
        try:
            columns = self._columns(x)
        except KeyError:
            return None
        if self._is_single:
            columns = (columns,)  # type: ignore[assignment]
        if set(map(type, columns)) != _ARRAYS:
            return None
        num_rows = len(columns[0]) if columns[0].ndim else 0
        if not 0 < num_rows <= FEW_ROWS or set(map(_SHAPE, columns)) != {(num_rows,)}:
            return None
        tables = []
        for start, end, reader in self._readers:
            table = reader(columns[start:end], num_rows)
            if table is None:
                return None
            tables.append(table)
        return tables


def _numbers(columns: Sequence[Column], num_rows: int) -> Floats | None:
    try:
        table = np.concatenate(columns)
    except TypeError:  # a date among numbers
        return None
    if table.dtype.kind not in "biuf":
        return None
    numbers: Floats = np.asarray(table, np.float64).reshape(len(columns), num_rows).T
    return numbers


def _codes_of(lookup: CategoryLookup) -> Reader:
    tables = [vocabulary.items()[0].get for vocabulary in lookup.vocabularies]
    if type(lookup) is not CategoryLookup or any(each.holds_objects for each in lookup.vocabularies):
        return lambda columns, _: lookup.of_columns(columns, is_without_frame=True)

    def codes(columns: Sequence[Column], num_rows: int) -> Floats | None:
        try:
            if num_rows == 1:
                found = [code_of(column.item(), UNKNOWN) for code_of, column in zip(tables, columns, strict=True)]
            else:
                found = [
                    code_of(cell, UNKNOWN)
                    for code_of, column in zip(tables, columns, strict=True)
                    for cell in column.tolist()
                ]
        except TypeError:  # a list among the cells
            return None
        if UNKNOWN in found:
            return None
        table: Floats = np.array(found, np.float64).reshape(len(columns), num_rows).T
        return table

    return codes
