"""Look-ups of categories: raw columns of text, objects or numbers to codes, on the host, before any tensor exists.

``convert/encode.py`` makes them of fitted encoders; ``Frontend`` calls them; the codes select rows of the tables of
``modules/columns/columns.py``. They hold plain Python values and numpy arrays, so they pickle without scikit-learn
or pandas.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Sequence
from datetime import date
from numbers import Integral, Real
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

Codes = npt.NDArray[np.int64]


class Lookup(Protocol):
    """The host part of an operator on text or object columns: raw columns to numbers (codes of categories)."""

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return ``[rows, width]`` float64 from raw columns ``[rows, features]`` of any dtype."""
        ...


class Factorizable(Protocol):
    """A column as pandas keeps text and categories: an extension array."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def factorize(self) -> tuple[Codes, Any]:
        """Return the index of each cell among the distinct values, -1 for missing ones, and these values."""
        ...


Column = npt.NDArray[Any] | Factorizable  # [rows]

SEARCHABLE = "iufbOUS"  # dtype kinds of categories that a vocabulary can hold; dates stay with their encoder
UNKNOWN = -1  # only between a vocabulary and its look-up; what leaves a look-up is the row of a table
FEW_ROWS = 64  # of which to find the distinct values takes longer than to look up all
LISTED = 10  # unknown categories that a message names


def is_missing(value: object) -> bool:
    """Return whether a cell is NaN or pandas' NA. None is a category like any other, as it is to scikit-learn."""
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return type(value).__name__ in ("NAType", "NaTType")  # by name: pandas may not be installed


def is_nan(value: object) -> bool:
    """Return whether a cell is NaN, which alone of what is missing may be a category; see :class:`Vocabulary`."""
    return isinstance(value, float | np.floating) and bool(value != value)


class Vocabulary:
    """The categories of one column; a category's code is its index among them.

    Values are equal as Python has it: 1, 1.0 and True are one category, 1 and "1" are two, and NaN equals NaN. pandas'
    NA is no category, as to scikit-learn, but in a nullable column of numbers, where it is NaN.

    Args:
        categories: ``[categories]``, distinct, of numbers, text or objects.
    """

    is_of_truths = False  # in files without it

    def __init__(self, categories: npt.NDArray[Any]) -> None:
        values = categories.tolist()
        self.size = len(values)
        self.is_of_truths = categories.dtype.kind == "b"
        self._code_of_missing = next((code for code, value in enumerate(values) if is_missing(value)), UNKNOWN)
        self._code_of = {value: code for code, value in enumerate(values) if not is_missing(value)}
        self._numbers: npt.NDArray[Any] | None = None  # sorted, for columns that are numbers as well
        if categories.dtype.kind in "iuf":
            present = np.array([code for code in range(self.size) if code != self._code_of_missing], np.int64)
            order = present[np.argsort(categories[present], kind="stable")]
            self._numbers, self._codes_of_numbers = categories[order], order

    @property
    def holds_objects(self) -> bool:
        """Return whether categories are neither texts nor truth values: then a column's dtype counts."""
        return not self.is_of_truths and not all(cell is None or isinstance(cell, str) for cell in self._code_of)

    @property
    def has_none(self) -> bool:
        """Return whether None is a category."""
        return None in self._code_of

    def items(self) -> tuple[dict[Any, int], int]:
        """Return the code of each category that is not missing, and that of missing cells (or ``UNKNOWN``)."""
        return dict(self._code_of), self._code_of_missing

    def check_kind(self, name: str, column: Column) -> None:
        """Refuse a column that holds no numbers where the categories are numbers: a date is no integer.

        And one of numbers where they are texts or objects, as scikit-learn's encoders do: a column of NaN alone, too.

        Raises:
            InvalidInputError: see above; ``name`` is what the message calls the column.
        """
        is_of_texts = self._numbers is None and not self.is_of_truths
        if is_of_texts and isinstance(column, np.ndarray) and column.dtype.kind in "iuf":
            raise InvalidInputError(
                f"column {name} is of dtype {column.dtype}, and the encoder was fitted on texts or objects: convert it "
                "with x.astype(object)"
            )
        if self._numbers is not None and isinstance(column, np.ndarray) and column.dtype.kind not in "iufOb":
            raise InvalidInputError(
                f"y contains previously unseen labels: column {name} is of dtype {column.dtype}, and the encoder was "
                "fitted on numbers; convert your data to numeric values"
            )

    def check_truths(self, name: str) -> None:
        """Refuse truth values that are no category, unless the first category as one is: the source looks that up."""
        first = next(iter(self._code_of), True)
        if bool(first) not in self._code_of:
            raise InvalidInputError(
                f"y contains previously unseen labels: column {name} holds truth values, and the encoder was fitted on "
                f"others, as {first!r}; convert them as when fitting"
            )

    def codes(self, column: Column) -> Codes:
        """Return codes ``[rows]`` of a column, ``UNKNOWN`` where a cell is no category.

        Raises:
            InvalidInputError: a cell is a list or another thing that cannot be a category.
        """
        if not isinstance(column, np.ndarray):
            return self._codes_of_distinct(column)
        if self._numbers is not None and column.dtype.kind in "iuf":
            return self._codes_by_search(self._numbers, column)
        return np.array(self.codes_of_cells(column.tolist()), np.int64)

    def codes_of_cells(self, cells: list[Any]) -> list[int]:
        """Return the codes of Python's own values, as :meth:`codes` does of an array."""
        try:
            codes = [self._code_of.get(cell, UNKNOWN) for cell in cells]
        except TypeError as error:
            raise InvalidInputError(f"a cell is no category ({error}); give text, numbers or missing values") from error
        if self._code_of_missing != UNKNOWN and UNKNOWN in codes:
            for row, cell in enumerate(cells):
                if codes[row] == UNKNOWN and is_nan(cell):
                    codes[row] = self._code_of_missing
        return codes

    def _codes_of_distinct(self, column: Factorizable) -> Codes:
        """Return codes by way of the distinct values, which pandas finds without making an object of each cell."""
        indices, distinct = column.factorize()
        codes = self.codes(np.asarray(distinct))
        is_gap = is_nan(getattr(getattr(column, "dtype", None), "na_value", math.nan))
        # -1, the last, stands for missing values.
        return np.append(codes, self._code_of_missing if is_gap else UNKNOWN)[indices]

    def _codes_by_search(self, numbers: npt.NDArray[Any], column: npt.NDArray[Any]) -> Codes:
        codes = np.full(len(column), UNKNOWN, np.int64)
        if len(numbers):
            indices = np.minimum(np.searchsorted(numbers, column), len(numbers) - 1)
            codes = np.where(numbers[indices] == column, self._codes_of_numbers[indices], UNKNOWN)
        if column.dtype.kind == "f":
            codes[np.isnan(column)] = self._code_of_missing
        return codes


class CategoryLookup:
    """Codes of several columns. An unknown category's code is the vocabulary's size: the table's row after the last.

    Args:
        vocabularies: One per column.
        unknown: ``refuse`` raises, ``warn`` warns, ``accept`` is silent.
        names: The columns' names, for messages.
    """

    def __init__(
        self,
        vocabularies: Sequence[Vocabulary],
        *,
        unknown: Literal["refuse", "warn", "accept"] = "accept",
        names: Sequence[str] = (),
    ) -> None:
        self.vocabularies = tuple(vocabularies)
        self.unknown = unknown
        self.names = tuple(names) or tuple(str(index) for index in range(len(vocabularies)))

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return float64 codes from raw columns, ``[rows, columns]`` both; errors as :meth:`of_columns`."""
        return self.of_columns(list(columns.T))

    def of_columns(self, columns: Sequence[Column], *, is_without_frame: bool = False) -> npt.NDArray[np.float64]:
        """Return codes ``[rows, columns]``, float64, from raw columns ``[rows]`` each.

        Args:
            columns: Raw columns.
            is_without_frame: None among texts counts as missing, as in a frame of them, unless it is a category.

        Raises:
            InvalidInputError: a category is unknown and ``unknown`` is ``refuse``, or a cell is no category.
        """
        columns = [as_source(column) for column in columns]
        for name, vocabulary, column in zip(self.names, self.vocabularies, columns, strict=True):
            vocabulary.check_kind(name, column)
        num_rows = len(columns[0])
        if num_rows > FEW_ROWS:
            codes = [vocabulary.codes(column) for vocabulary, column in zip(self.vocabularies, columns, strict=True)]
            result = np.concatenate(codes, dtype=np.float64).reshape(len(codes), num_rows).T
            has_unknown = bool(result.min() == UNKNOWN)
        else:  # for which lists are quicker than arrays
            cells = [
                column.tolist() if type(column) is np.ndarray else np.asarray(column).tolist() for column in columns
            ]
            rows = [vocabulary.codes_of_cells(each) for vocabulary, each in zip(self.vocabularies, cells, strict=True)]
            result = np.array(rows, np.float64).reshape(len(rows), num_rows).T
            has_unknown = any(UNKNOWN in row for row in rows)
        if has_unknown and is_without_frame:
            lost = (result == UNKNOWN).any(axis=0).tolist()
            for index, known in enumerate(self.vocabularies):
                if lost[index] and not known.has_none:
                    columns[index] = as_in_a_frame(columns[index])
            return self.of_columns(columns)
        if has_unknown:
            self._encode_unknown(columns, result)
        return result

    def _encode_unknown(self, columns: Sequence[Column], result: npt.NDArray[np.float64]) -> None:
        with_unknown = []
        for index, name in enumerate(self.names):
            is_unknown = result[:, index] == UNKNOWN
            if is_unknown.any():
                with_unknown.append(name)
                cells = np.asarray(columns[index])[is_unknown]
                _refuse_odd(name, cells)
                if self.unknown == "refuse":
                    raise InvalidInputError(_refusal(name, cells))
                if cells.dtype.kind == "b":
                    self.vocabularies[index].check_truths(name)
                result[is_unknown, index] = self.codes_of_unknown(index, cells)
        if with_unknown and self.unknown == "warn":
            warnings.warn(f"unknown categories in the columns {with_unknown}", UserWarning, stacklevel=3)

    def codes_of_unknown(self, index: int, cells: npt.NDArray[Any]) -> int | Codes:
        """Return the codes for cells of column ``index`` that are no category."""
        return self.vocabularies[index].size


class HashLookup(CategoryLookup):
    """Codes of several columns whose unknown categories fall into buckets: the table's rows after the vocabulary's.

    Args:
        vocabularies: One per column.
        num_buckets: Buckets of each column.
    """

    def __init__(self, vocabularies: Sequence[Vocabulary], *, num_buckets: int) -> None:
        super().__init__(vocabularies)
        self.num_buckets = num_buckets

    def codes_of_unknown(self, index: int, cells: npt.NDArray[Any]) -> int | Codes:
        """See the class."""
        size = self.vocabularies[index].size
        return np.array([size + bucket(cell, self.num_buckets) for cell in cells.tolist()], np.int64)


class MissingLookup:
    """Flags of missing cells, 1.0 and 0.0.

    Args:
        marker: Content of a missing cell: NaN, or a number, a text or None, compared by ``==``.
        columns: Indices of the columns that are flagged.
        refuses_new: True refuses missing cells in any other column.
        names: The names of all columns.
    """

    def __init__(self, marker: object, columns: Sequence[int], *, refuses_new: bool, names: Sequence[str]) -> None:
        self.marker = marker
        self.places = tuple(columns)  # saved files hold this name
        self.refuses_new = refuses_new
        self.names = tuple(names)

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return flags ``[rows, flagged columns]``.

        Raises:
            InvalidInputError: a column has missing cells and had none when the source was fitted.
        """
        self._check(columns)
        flags = self._flags(columns)
        new = [name for index, name in enumerate(self.names) if index not in self.places and flags[:, index].any()]
        if self.refuses_new and new:
            raise InvalidInputError(
                f"the columns {new} have missing values and had none when the indicator was fitted; "
                "fill them in, or fit it with error_on_new=False or features='all'"
            )
        return flags[:, self.places].astype(np.float64)

    def check_frame(self, frame: Any) -> None:
        """Refuse NA among texts and objects where NaN is looked for, since it stays NA there.

        Raises:
            InvalidInputError: see above.
        """
        for name, dtype in frame.dtypes.items() if is_nan(self.marker) else ():
            gaps = frame[name][frame[name].isna()] if dtype.kind not in "iufb" else ()
            if any(type(cell).__name__ == "NAType" for cell in gaps):
                raise InvalidInputError(f"column {name} holds pandas' NA: boolean value of NA is ambiguous")

    def _check(self, columns: npt.NDArray[Any]) -> None:
        if columns.dtype.kind not in "fiuO":
            raise InvalidInputError(
                f"MissingIndicator does not support data with dtype {columns.dtype}; give numbers, or objects"
            )
        if columns.dtype.kind == "O" and any(isinstance(cell, date | np.datetime64) for cell in columns.flat):
            raise InvalidInputError("MissingIndicator does not support dates; leave those columns out")
        if columns.dtype.kind == "f" and np.isinf(columns).any():
            raise InvalidInputError("Input X contains infinity, which MissingIndicator refuses")
        has_marker = is_missing(self.marker) or columns.dtype.kind in "iu"
        if not has_marker and np.frompyfunc(is_missing, 1, 1)(columns).any():
            raise InvalidInputError(f"Input X contains NaN, where MissingIndicator looks for {self.marker!r}")

    def _flags(self, columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not is_missing(self.marker):
            return np.broadcast_to(np.asarray(columns == self.marker, np.bool_), columns.shape)
        if columns.dtype.kind == "f":
            return np.asarray(np.isnan(columns))
        if columns.dtype.kind != "O":
            return np.zeros(columns.shape, np.bool_)
        return np.asarray(np.frompyfunc(is_missing, 1, 1)(columns), np.bool_)


def bucket(category: Any, num_buckets: int) -> int:
    """Return the bucket of a category, 0 to ``num_buckets - 1``, equal in every process and for equal categories.

    Example:
        >>> bucket(1, 1000) == bucket(1.0, 1000) == bucket(True, 1000)
        True
    """
    is_whole = isinstance(category, Integral | np.bool_) or (
        isinstance(category, Real) and float(category).is_integer()
    )
    if is_whole:
        category = int(category)
    text = "nan" if is_missing(category) else str(category)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % num_buckets


def as_in_a_frame(column: Column, *, is_list: bool = False) -> Column:
    """Return texts as pandas' columns have them, with NaN for what is missing; of a list, numbers too."""
    if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim != 1:
        return column
    gaps = np.array([cell is None or is_missing(cell) for cell in column.tolist()], bool)
    others = {type(cell) for cell in column[~gaps].tolist()}
    if is_list and others <= {int, float} and not any(type(cell).__name__ == "NAType" for cell in column[gaps]):
        with contextlib.suppress(OverflowError):
            return np.where(gaps, np.nan, column).astype(np.float64)
    return np.where(gaps, np.nan, column) if gaps.any() and others <= {str} else column


def as_source(column: Column) -> Column:
    """Return a nullable column, or categories, of numbers or truth values as floats with NaN; others as is."""
    dtype: Any = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype):
        return column
    cells: Any = column
    if type(dtype).__name__ == "CategoricalDtype":
        kind = getattr(dtype.categories.dtype, "kind", "O")
        return np.asarray(cells, np.float64 if kind == "b" else None) if kind in "iufb" else column
    if getattr(dtype, "kind", "O") not in "iufb":
        return column
    return np.asarray(cells.to_numpy(dtype=np.float64, na_value=math.nan))


def _refuse_odd(name: str, cells: npt.NDArray[Any]) -> None:
    """Refuse infinity among numbers, and dates; encoders take all else that they do not know, if configured to."""
    if any(isinstance(cell, date | np.datetime64) for cell in cells.tolist()):
        raise InvalidInputError(f"column {name} holds dates, which the encoder was not fitted on")
    if any(isinstance(cell, float) and math.isinf(cell) for cell in cells.tolist()):
        raise InvalidInputError(f"column {name} contains infinity, which is no category; drop those rows")


def _refusal(name: str, cells: npt.NDArray[Any]) -> str:
    found = list(dict.fromkeys(repr(cell) for cell in cells.tolist()))
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return (
        f"column {name} has categories that the encoder was not fitted on: {', '.join(found[:LISTED])}{more}; "
        "drop those rows, or fit the encoder with a handle_unknown other than 'error'"
    )
