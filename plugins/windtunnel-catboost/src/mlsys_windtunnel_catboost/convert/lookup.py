"""The host part of CatBoost's models with categories: raw columns to numbers, codes and statistics of the target.

CatBoost keeps no categories, only hashes of their text; the statistics are looked up by hashes of several columns
together. It computes both in its own precision, so this does: 64-bit wheel arithmetic and float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.trees_lookup import numbers

from mlsys_windtunnel_catboost.convert.cityhash import city_hash_64

Hashes = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x4906BA494954CB65)


@dataclass(frozen=True, slots=True)
class Combination:
    """Combination of columns by which a statistic is looked up. Columns are those of the raw table."""

    categories: tuple[int, ...]  # columns whose hashes count
    borders: tuple[tuple[int, float, bool], ...]  # column, border, whether missing is above; counts whether above it
    matches: tuple[tuple[int, int], ...]  # column, hash as int32; counts whether the column's is that

    def keys(self, columns: dict[int, npt.NDArray[Any]]) -> Hashes:
        """Return the keys ``[rows]`` from hashes (int32) and numbers (float64) by column."""
        parts: list[npt.NDArray[Any]] = [columns[column] for column in self.categories]
        for column, border, missing_is_above in self.borders:
            values = columns[column].astype(np.float32)
            parts.append(np.where(np.isnan(values), missing_is_above, values > np.float32(border)))
        parts += [columns[column] == code for column, code in self.matches]
        keys = np.zeros(len(parts[0]), np.uint64)
        for part in parts:
            keys = _MULTIPLIER * (keys + _MULTIPLIER * part.astype(np.int64).view(np.uint64))
        return keys


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of the target by combination of categories, as a table."""

    combination: Combination
    keys: Hashes  # [entries], ascending
    values: npt.NDArray[np.float64]  # [entries + 1]; the last is for a combination that was not seen

    def of(self, keys: Hashes) -> npt.NDArray[np.float64]:
        """Look up the value of each key, ``[rows]``; unknown keys have the last value."""
        if not len(self.keys):
            return np.full(len(keys), self.values[-1])
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return self.values[np.where(self.keys[index] == keys, index, len(self.keys))]


@dataclass(frozen=True, slots=True)
class CatBoostLookup:
    """Look-up of the values that the trees compare: numbers, codes of categories, and statistics, in this order."""

    numeric: tuple[int, ...]  # columns of the raw table
    coded: tuple[tuple[int, tuple[int, ...]], ...]  # column, hashes: the code is the index, NaN for any other
    statistics: tuple[Statistic, ...]
    names: tuple[str, ...]  # of all columns of the raw table

    @property
    def width(self) -> int:
        """Columns of the table that is given."""
        return len(self.numeric) + len(self.coded) + len(self.statistics)

    def text_columns(self) -> Sequence[int]:
        """Return the columns that may be given as text: all that hold categories, since CatBoost makes text of them."""
        return sorted({*(column for column, _ in self.coded), *self._of_combinations("categories")})

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return ``[rows, width]`` float64 from raw columns ``[rows, features]``.

        Raises:
            InvalidInputError: text in a column of numbers, or a category that is neither text nor a whole number.
        """
        read: dict[int, npt.NDArray[Any]] = {
            column: numbers(columns[:, column], column) for column in {*self.numeric, *self._of_combinations("borders")}
        }
        for column in self.text_columns():
            read[column] = hashes(columns[:, column], self.names[column])
        keys = {part.combination: part.combination.keys(read) for part in self.statistics}
        table = [read[column] for column in self.numeric]
        table += [_codes(read[column], known) for column, known in self.coded]
        table += [part.of(keys[part.combination]) for part in self.statistics]
        return np.stack(table, axis=1).astype(np.float64)

    def _of_combinations(self, kind: str) -> set[int]:
        """Return the columns that the combinations read as ``categories`` (``matches`` too) or as ``borders``."""
        parts = [part.combination for part in self.statistics]
        if kind == "borders":
            return {column for part in parts for column, _, _ in part.borders}
        matched = {column for part in parts for column, _ in part.matches}
        return matched | {column for part in parts for column in part.categories}


def hashes(cells: npt.NDArray[Any], name: str) -> npt.NDArray[np.int64]:
    """Return CatBoost's 32-bit hashes of a column of categories, as signed numbers.

    Raises:
        InvalidInputError: a cell is no text and no whole number.
    """
    found = {cell: _hash(cell, name) for cell in dict.fromkeys(cells.tolist())}
    return np.array([found[cell] for cell in cells.tolist()], np.uint32).astype(np.int32).astype(np.int64)


def _hash(cell: object, name: str) -> int:
    if isinstance(cell, float) and cell.is_integer():  # of a table with numbers beside, where 1 has become 1.0
        cell = int(cell)
    if isinstance(cell, int):
        cell = str(int(cell))  # True is 1
    if isinstance(cell, str):
        cell = cell.encode()
    if not isinstance(cell, bytes):
        raise InvalidInputError(
            f"column {name} holds {cell!r} as a category; CatBoost takes text and whole numbers, so make text of it"
        )
    return city_hash_64(cell) & 0xFFFFFFFF


def _codes(cells: npt.NDArray[Any], known: Sequence[int]) -> npt.NDArray[np.float64]:
    codes = np.full(len(cells), np.nan)
    for code, value in enumerate(known):
        codes[cells == value] = code
    return codes
