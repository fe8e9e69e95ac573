"""Raw input, whatever holds it: arrays, pandas' frames, mappings from names to columns.

``validate.py`` looks at it first; what is read here is refused only where a cell is no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.host.lookup import FEW_ROWS, Column, as_in_a_frame, is_missing

Table = Any  # [rows, columns]: numpy array, pandas DataFrame, scipy sparse matrix, or columns [rows] by their names

Floats = npt.NDArray[np.float64]
_KINDS = {"c": "Complex data not supported,", "M": "dates", "m": "times", "S": "bytes", "U": "text", "V": "records"}


def is_polars(x: Table) -> bool:
    """Return whether a frame of polars, which is told by its module: the package need not be installed."""
    return type(x).__module__.partition(".")[0] == "polars" and type(x).__name__ in ("DataFrame", "LazyFrame")


def of_polars(x: Any) -> Any:
    """Return a frame of polars whose rows are there.

    Raises:
        InvalidInputError: it is lazy.
    """
    if type(x).__name__ == "LazyFrame":
        raise InvalidInputError("the input is a polars LazyFrame, which has no rows yet: pass x.collect()")
    return x


def has_names(x: Table) -> bool:
    """Return whether columns can be asked for by name."""
    if isinstance(x, Mapping):
        return not hasattr(x, "nnz")  # a sparse matrix of scipy's is a dictionary too
    return hasattr(x, "columns")


class PlainTable:
    """A table without names that count: an array, a frame by its places, a sparse matrix, or objects ``[rows]``."""

    is_without_frame = False

    def __init__(self, x: Any) -> None:
        self.whole = x  # as it was given

    @property
    def is_by_column(self) -> bool:
        """True where columns can be read one by one."""
        return isinstance(self.whole, np.ndarray)

    def numbers(self, indices: Sequence[int] | None, name: str) -> Floats:
        """Return some columns, or all, as float64; see :func:`numbers`."""
        return numbers(self.whole if indices is None else self.whole[:, indices], name, takes_na=False)

    def cells(self, indices: Sequence[int]) -> list[Column]:
        """Return some columns as they are."""
        return [self.whole[:, index] for index in indices]


class NamedTable:
    """A DataFrame, or a mapping from names to columns ``[rows]`` or ``[rows, 1]``, read by the pipeline's columns.

    Args:
        x: The table; columns that the pipeline does not know are not looked at.
        names: Those of the pipeline's columns, in order.
        read: Indices of the columns that will be read; None: all.

    Raises:
        InvalidInputError: one of them is not there, is there twice, or is longer or shorter than others.
    """

    is_by_column = True

    def __init__(self, x: Any, names: Sequence[str], read: Sequence[int] | None = None) -> None:
        self._names = names
        self._is_mapping = self.is_without_frame = isinstance(x, Mapping)
        self._shape = (_length(next(iter(x.values()), ()) if self._is_mapping else x),)
        self._x = x
        if is_polars(x):  # columns are read as arrays, and the frame is handed on as it is
            self._is_mapping = True
            self._columns = {name: x[name].to_numpy() for name in names if name in x.columns}
        else:
            self._columns = x if self._is_mapping or self._shape[0] > FEW_ROWS else _arrays_by_name(x)
        self._wanted = names if read is None else [names[index] for index in read]
        self._cells = {name: self._checked(name) for name in self._wanted}

    def numbers(self, indices: Sequence[int] | None, name: str) -> Floats:
        """Return some columns, or all, as float64; see :func:`numbers`."""
        names = self._names if indices is None else [self._names[index] for index in indices]
        columns = [self._cells[each] for each in names]
        if not columns:
            return np.empty((*self._shape, 0))
        if not all(type(column) is np.ndarray for column in columns):
            columns = [numbers(column, name) for column in columns]
        try:
            joined = np.concatenate(columns)
        except TypeError:  # a date among numbers, which is refused by itself
            joined = np.concatenate([numbers(column, name) for column in columns])
        try:
            table = np.asarray(joined, np.float64)
        except (TypeError, ValueError, OverflowError):  # NA, or no numbers: which it is, columns tell one by one
            if not self._is_mapping:
                columns = [numbers(self._x[each], name) for each in names]
            table = numbers(np.concatenate(columns), name)
        return table.reshape(len(columns), *self._shape).T

    def cells(self, indices: Sequence[int]) -> list[Column]:
        """Return some columns for a look-up: as pandas keeps text and categories, where it has many rows of them."""
        return [_kept(self._with_dtype(self._names[index])) for index in indices]

    def _with_dtype(self, name: str) -> Any:
        """Return a column; from the frame, if it may hold more than texts, since columns of several dtypes do."""
        column = self._cells[name]
        if self._columns is self._x or not self._shape[0]:
            return column
        is_apart = type(column[0]) is not str or any(type(cell).__name__ == "NAType" for cell in column)
        return self._x[name] if is_apart else column

    def _checked(self, name: str) -> Any:
        """Return one of the pipeline's columns, a Series or an array ``[rows]``; see the class for refusals."""
        try:
            cells = self._columns[name]
        except KeyError:
            missing = [name for name in self._wanted if name not in self._columns]
            raise InvalidInputError(
                f"the input lacks the columns {missing}; the pipeline was fitted on {list(self._names)}"
            ) from None
        if type(cells) is np.ndarray and cells.shape == self._shape:
            return cells
        if not hasattr(cells, "shape"):
            cells = as_in_a_frame(array_of(cells), is_list=True)
        if not cells.shape:
            raise InvalidInputError(f"the column {name!r} is one value: give columns as lists, as {{{name!r}: [...]}}")
        if self._is_mapping and cells.shape == (*self._shape, 1):
            cells = cells[:, 0]
        if cells.shape != self._shape:
            raise InvalidInputError(
                f"the column {name!r} has shape {tuple(cells.shape)}; a cell for each of the {self._shape[0]} rows is "
                "needed"
            )
        return cells

    @property
    def whole(self) -> Any:
        """A DataFrame of the pipeline's columns; those that are not there are missing in each row."""
        names, frame = list(self._names), self._x
        cells = {name: self._cells.get(name) for name in names if name in self._columns}
        cells = {name: self._checked(name) if column is None else column for name, column in cells.items()}
        absent = [name for name in names if name not in cells]
        if is_polars(frame):
            return frame.with_columns(**dict.fromkeys(absent)).select(names)
        if self._is_mapping:
            import pandas as pd

            frame = pd.DataFrame(cells)
        return frame.reindex(columns=names) if absent else frame[names]


def _length(column: Any) -> int:
    try:
        return len(column)
    except TypeError:  # one value, which is refused when it is read
        return 1


def _arrays_by_name(frame: Any) -> Any:
    """Return the arrays of a frame of few rows, made in one step: pandas takes much longer column by column."""
    arrays = dict(zip(frame.columns, np.asarray(frame, dtype=object).T, strict=True))
    return arrays if len(arrays) == len(frame.columns) else frame


def _kept(column: Any) -> Column:
    if type(column) is np.ndarray:
        return column
    is_pandas_own = hasattr(column, "array") and not isinstance(column.dtype, np.dtype)
    return column.array if is_pandas_own else np.asarray(column)


def stored_cells(table: Any) -> Floats:
    """Return a sparse table as an array in which NaN stands for each cell that is not stored."""
    stored = table.tocsr().tocoo()  # what is stored twice is summed
    made = np.full(table.shape, np.nan)
    made[stored.row, stored.col] = stored.data
    return made


def raw(table: Table) -> npt.NDArray[Any]:
    """Return a table as a dense array; what is missing in a frame's nullable numbers is NaN, and no object."""
    if hasattr(table, "toarray"):
        table = table.toarray()
    elif hasattr(table, "iloc") and hasattr(table, "columns"):
        nullable = [name for name, dtype in table.dtypes.items() if not isinstance(dtype, np.dtype)]
        numbers = [name for name in nullable if getattr(table[name].dtype, "kind", "O") in "iufb"]
        table = table.astype(dict.fromkeys(numbers, "float64")) if numbers else table
    array: npt.NDArray[Any] = np.asarray(table)
    return array


def array_of(rows: Any) -> npt.NDArray[Any]:
    """Return an array of rows that are none yet; ["a", 1] stays two objects, where NumPy makes the text "1" of 1."""
    try:
        array = np.asarray(rows)
        return np.asarray(rows, dtype=object) if array.dtype.kind in "US" else array
    except (TypeError, ValueError, OverflowError) as error:  # rows of unlike lengths
        raise InvalidInputError(f"the input is no table of [rows, columns] ({error})") from error


def numbers(cells: Any, name: str, *, takes_na: bool = True) -> Floats:
    """Return cells of an array, a Series or a frame as float64.

    Args:
        cells: ``[rows]`` or ``[rows, columns]``.
        name: Name of the cells in messages.
        takes_na: True makes pandas' NA among an array's objects NaN, as that of a nullable column.

    Raises:
        InvalidInputError: there is text among them, or what is no number.
    """
    dtypes = cells.dtypes if hasattr(cells, "columns") else [getattr(cells, "dtype", None)]
    for kind in {getattr(dtype, "kind", "f") for dtype in dtypes}:
        if kind in "cMm" or (kind in "SUV" and type(cells) is np.ndarray):
            raise InvalidInputError(f"{name}: {_KINDS[kind]} where numbers belong: convert your data to numeric values")
    try:
        if type(cells) is not np.ndarray and hasattr(cells, "to_numpy") and not _is_plain(cells):
            if np.dtype(object) in dtypes:  # to a source, NA of a column of objects is no number
                return np.asarray(cells.astype(np.float64), np.float64)
            cells = cells.to_numpy(dtype=np.float64, na_value=np.nan)
        try:
            return np.asarray(cells, np.float64)
        except TypeError:  # what pandas has for missing values may be among objects
            if not takes_na:
                raise
            missing = np.frompyfunc(is_missing, 1, 1)(cells).astype(bool)
            return np.asarray(np.where(missing, np.nan, cells), np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{name}: text where numbers belong ({error})") from error


def _is_plain(column: Any) -> bool:
    """Return whether a Series is one of numpy's numbers."""
    dtype = getattr(column, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"
