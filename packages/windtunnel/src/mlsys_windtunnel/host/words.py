"""Vectorisers of text as plain data: counts of n-grams, weighted and normalised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.host.loader import table_of_words

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
    column: int = 0  # in an exported file: index of the raw column
    kind: str = "words"

    def transform(self, texts: Any) -> npt.NDArray[np.float64]:
        """Return ``[rows, terms]`` from texts ``[rows]``.

        Raises:
            InvalidInputError: a cell is no text.
        """
        cells = np.asarray(texts, dtype=object)
        if cells.ndim != 1:
            raise InvalidInputError(f"texts of shape {cells.shape}; one column of texts is needed")
        try:
            made: npt.NDArray[np.float64] = table_of_words(asdict(self), "the texts", cells.tolist())
        except ValueError as error:
            raise InvalidInputError(f"{error}; np.nan is an invalid document, give text") from error
        return made

    @property
    def is_sound(self) -> bool:
        """Return whether a file may hold this: columns within the table, and a pattern that takes no time."""
        columns = set(self.vocabulary.values())
        is_known = self.analyzer in ("char", "char_wb") or (self.analyzer == "word" and self.pattern in PATTERNS)
        has_weights = self.idf is None or len(self.idf) == len(columns)
        return is_known and columns == set(range(len(self.vocabulary))) and has_weights
