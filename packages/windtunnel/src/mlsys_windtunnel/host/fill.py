"""Estimators of text and objects as plain data.

Imputers run before the look-ups that read what they fill; vectorisers count n-grams, weight and normalise them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
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
    reads_numbers: bool = False  # texts that spell numbers and truth values are numbers, as means are computed of
    refuses_none: bool = False  # of a source that hands frames on, in which None becomes NaN if a text stands beside it

    def transform(self, table: Any) -> npt.NDArray[Any]:
        """Return the kept columns without missing cells, ``[rows, kept]``: float64, or objects.

        Raises:
            InvalidInputError: cells are missing otherwise than the source was fitted for, or infinite.
        """
        if hasattr(table, "toarray"):
            raise InvalidInputError("Sparse data was passed to an imputer of objects: pass X.toarray()")
        if not self.is_of_numbers and not self.takes_all_missing and _has_nullable_gaps(table):
            raise InvalidInputError("the input holds pandas' NA in a nullable column: boolean value of NA is ambiguous")
        cells = _cells(table)
        if self.is_of_numbers and not self.reads_numbers:
            if not is_polars(table) and np.asarray(table).dtype.kind == "b":
                raise InvalidInputError("SimpleImputer does not support data with dtype bool; give numbers")
            if cells.dtype == object and any(isinstance(cell, str) for cell in cells.flat):
                raise InvalidInputError("the imputer's input: text where numbers belong, even if it spells numbers")
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


def _has_nullable_gaps(table: Any) -> bool:
    """Return whether a frame has nullable columns of numbers with NA, which stay NA among objects."""
    names = table.columns if hasattr(table, "iloc") and table.ndim == 2 else ()
    nullable = [name for name in names if type(getattr(table[name].dtype, "na_value", None)).__name__ == "NAType"]
    return any(table[name].dtype.kind in "iufb" and bool(table[name].isna().any()) for name in nullable)


def _cells(table: Any) -> npt.NDArray[Any]:
    """Return cells as the source sees them: numbers where all columns hold numbers, else objects."""
    if is_polars(table):
        table = table.to_numpy()
    cells = np.asarray(table)
    return cells.astype(object) if cells.dtype.kind in "USb" else cells


_SPACES = re.compile(r"\s\s+")
PATTERNS = (r"(?u)\b\w\w+\b", r"(?u)\b\w+\b", r"\b\w\w+\b", r"\b\w+\b", r"\w+", r"\S+")  # none takes long for any text


@dataclass(frozen=True, slots=True)
class Words:
    """A fitted ``CountVectorizer`` or ``TfidfVectorizer`` of a column's texts."""

    vocabulary: dict[str, int]
    analyzer: str  # word, char or char_wb
    ngrams: tuple[int, int]
    pattern: str  # of tokens; one of PATTERNS
    stop_words: tuple[str, ...]
    lowercase: bool
    strip_accents: str | None
    is_binary: bool
    idf: tuple[float, ...] | None  # by column
    norm: str | None
    sublinear: bool

    def transform(self, texts: Any) -> npt.NDArray[np.float64]:
        """Return ``[rows, terms]`` from texts ``[rows]``.

        Raises:
            InvalidInputError: a cell is no text.
        """
        cells = np.asarray(texts, dtype=object)
        if cells.ndim != 1:
            raise InvalidInputError(f"texts of shape {cells.shape}; one column of texts is needed")
        return self._weighted(self._counts(cells.tolist()))

    def _counts(self, texts: Sequence[Any]) -> npt.NDArray[np.float64]:
        counts = np.zeros((len(texts), len(self.vocabulary)))
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidInputError(
                    f"column the texts holds {text!r}, which is no text; np.nan is an invalid document, give text"
                )
            for term in self._terms(text):
                if term in self.vocabulary:
                    counts[row, self.vocabulary[term]] += 1
        return counts

    def _weighted(self, table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.is_binary:
            table = np.minimum(table, 1)
        if self.sublinear:
            table = np.where(table > 0, np.log(np.where(table > 0, table, 1)) + 1, 0)
        if self.idf is not None:
            table = table * np.array(self.idf)
        if self.norm is not None:
            size = np.abs(table).sum(axis=1) if self.norm == "l1" else np.sqrt((table * table).sum(axis=1))
            table = table / np.where(size == 0, 1, size)[:, None]
        return table

    def _terms(self, text: str) -> list[str]:
        """Return the n-grams of a text, one after another, as scikit-learn's analyzers do."""
        if self.lowercase:
            text = text.lower()
        if self.strip_accents and not text.isascii():
            apart = unicodedata.normalize("NFKD", text)
            is_ascii = self.strip_accents == "ascii"
            text = "".join(each for each in apart if (each.isascii() if is_ascii else not unicodedata.combining(each)))
        low, high = self.ngrams
        if self.analyzer == "word":
            tokens = [each for each in re.findall(self.pattern, text) if each not in self.stop_words]
            return [
                " ".join(tokens[start : start + size])
                for size in range(low, min(high, len(tokens)) + 1)
                for start in range(len(tokens) - size + 1)
            ]
        text = _SPACES.sub(" ", text)
        if self.analyzer == "char":
            sizes = range(low, min(high, len(text)) + 1)
            return [text[start : start + size] for size in sizes for start in range(len(text) - size + 1)]
        found = []
        for word in text.split():
            padded = f" {word} "
            for size in range(low, high + 1):
                found += [padded[start : start + size] for start in range(max(1, len(padded) - size + 1))]
                if size >= len(padded):  # a short word counts once
                    break
        return found

    @property
    def is_sound(self) -> bool:
        """Return whether a file may hold this: columns within the table, and a pattern that takes no time."""
        columns = set(self.vocabulary.values())
        is_known = self.analyzer in ("char", "char_wb") or (self.analyzer == "word" and self.pattern in PATTERNS)
        has_weights = self.idf is None or len(self.idf) == len(columns)
        return is_known and columns == set(range(len(self.vocabulary))) and has_weights
