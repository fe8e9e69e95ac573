"""The host part of trees with categories of text or objects: raw columns to a table of codes and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.host.lookup import LISTED, UNKNOWN, Vocabulary, as_source, is_missing


class MixedLookup:
    """Map of some columns to codes, NaN for what is no category; of the others to numbers, NaN for what is missing.

    Args:
        categories: By column, ``[categories]`` each: a category's code is its index.
        columns: Columns to give, in this order.
    """

    def __init__(self, categories: Mapping[int, npt.NDArray[Any]], columns: Sequence[int]) -> None:
        self.vocabularies = {column: Vocabulary(values) for column, values in categories.items()}
        self.columns = tuple(columns)

    def check_frame(self, frame: Any) -> None:
        """Look at a frame before it becomes an array, in which NA of a nullable column and of objects are alike.

        Raises:
            InvalidInputError: a column of objects that numbers are read from holds pandas' NA.
        """
        for column in self.columns:
            cells = frame.iloc[:, column]
            if column not in self.vocabularies and cells.dtype == object:
                try:
                    cells.to_numpy().astype(np.float64)
                except (TypeError, ValueError) as error:
                    raise InvalidInputError(f"column {column}: text where numbers belong ({error})") from error

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return ``[rows, len(columns)]`` float64 from raw columns ``[rows, features]``.

        Raises:
            InvalidInputError: text in a column of numbers.
        """
        table = np.empty((len(columns), len(self.columns)), np.float64)
        for index, column in enumerate(self.columns):
            cells = columns[:, column]
            if (vocabulary := self.vocabularies.get(column)) is not None:
                codes = vocabulary.codes(cells)
                self.check_known(cells[codes == UNKNOWN], column)
                table[:, index] = np.where(codes == UNKNOWN, np.nan, codes)
            else:
                table[:, index] = numbers(cells, column)
        return table

    def check_known(self, unknown: npt.NDArray[Any], column: int) -> None:
        """Look at the cells of a column that are no category; here they count as missing."""


class EncodedLookup(MixedLookup):
    """The same for a source that encodes a frame's columns by scikit-learn, whose encoders look at dtypes."""

    def check_frame(self, frame: Any) -> None:
        """Look at the columns of categories too; see :meth:`MixedLookup.check_frame`."""
        super().check_frame(frame)
        for column, vocabulary in self.vocabularies.items():
            given = frame.iloc[:, column]
            cells = as_source(given.to_numpy() if isinstance(given.dtype, np.dtype) else given.array)
            vocabulary.check_kind(str(column), cells)
            if isinstance(cells, np.ndarray) and cells.dtype.kind == "b" and UNKNOWN in vocabulary.codes(cells):
                vocabulary.check_truths(str(column))


class KnownLookup(MixedLookup):
    """The same for a source that refuses a category which it was not fitted on, as XGBoost does."""

    def check_known(self, unknown: npt.NDArray[Any], column: int) -> None:
        """Refuse what is neither a category nor missing.

        Raises:
            InvalidInputError: see above.
        """
        found = list(
            dict.fromkeys(repr(cell) for cell in unknown.tolist() if cell is not None and not is_missing(cell))
        )
        if found:
            raise InvalidInputError(
                f"Found a category not in the training set for column {column}: {', '.join(found[:LISTED])}; "
                "drop those rows, or leave the cells missing"
            )


def numbers(cells: npt.NDArray[Any], column: int) -> npt.NDArray[np.float64]:
    """Return a column's numbers, NaN where it is missing.

    Raises:
        InvalidInputError: it holds text, or pandas' NA as an object.
    """
    try:
        return cells.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"column {column}: text where numbers belong ({error})") from error
