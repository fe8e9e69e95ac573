"""Raw input, whatever holds it: arrays, pandas' frames, mappings from names to columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.lookup import Column

Table = Any  # [rows, columns]: numpy array, pandas DataFrame, scipy sparse matrix, or columns [rows] by their names

Floats = npt.NDArray[np.float64]

_FEW_ROWS = 64  # of which pandas takes longer to find the distinct values than to make objects of all


def has_names(x: Table) -> bool:
    """Whether columns can be asked for by name."""
    return isinstance(x, Mapping) or hasattr(x, "columns")


class PlainTable:
    """An array."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self._x = x

    def numbers(self, places: Sequence[int] | None, name: str) -> Floats:
        """Some columns, or all, as float64; see :func:`numbers`."""
        return numbers(self._x if places is None else self._x[:, places], name)

    def cells(self, places: Sequence[int]) -> list[Column]:
        """Some columns as they are."""
        return [self._x[:, place] for place in places]


class NamedTable:
    """A DataFrame, or a mapping from names to columns ``[rows]`` or ``[rows, 1]``, read by the pipeline's columns.

    Args:
        x: The table; columns that the pipeline does not know are not looked at.
        names: Those of the pipeline's columns, in order.
    """

    def __init__(self, x: Any, names: Sequence[str]) -> None:
        self._x = x
        self._names = names
        self._is_mapping = isinstance(x, Mapping)
        self._shape = (len(next(iter(x.values()), ()) if self._is_mapping else x),)

    def numbers(self, places: Sequence[int] | None, name: str) -> Floats:
        """Some columns, or all, as float64; see :func:`numbers`, and :meth:`column`."""
        names = self._names if places is None else [self._names[place] for place in places]
        if self._is_mapping:
            try:
                table = np.array([self._x[each] for each in names], np.float64)
                if table.shape == (len(names), *self._shape):
                    return table.T
            except (KeyError, TypeError, ValueError):
                pass  # columns of another form, or wrong ones: one by one, then
        columns = [numbers(self.column(each), name) for each in names]
        return np.array(columns).T if columns else np.empty((*self._shape, 0))

    def cells(self, places: Sequence[int]) -> list[Column]:
        """Some columns for a look-up: as pandas keeps text and categories, where it has many rows of them."""
        columns = [self.column(self._names[place]) for place in places]
        return [_kept(column) if self._shape[0] > _FEW_ROWS else np.asarray(column) for column in columns]

    def column(self, name: str) -> Any:
        """One of the pipeline's columns, a Series or an array ``[rows]``.

        Raises:
            InvalidInputError: it is not there, is there twice, or is longer or shorter than others.
        """
        try:
            cells = self._x[name]
        except KeyError:
            missing = [name for name in self._names if name not in self._x]
            raise InvalidInputError(
                f"the input lacks the columns {missing}; the pipeline was fitted on {list(self._names)}"
            ) from None
        if not hasattr(cells, "shape"):
            cells = array_of(cells)
        if self._is_mapping and cells.shape == (*self._shape, 1):
            cells = cells[:, 0]
        if cells.shape != self._shape:
            raise InvalidInputError(
                f"the column {name!r} has shape {tuple(cells.shape)}; a cell for each of the {self._shape[0]} rows is "
                "needed"
            )
        return cells

    def frame(self) -> Any:
        """A DataFrame of the pipeline's columns; errors as :meth:`column`."""
        columns = {name: self.column(name) for name in self._names}
        if not self._is_mapping:
            return self._x[list(self._names)]
        import pandas as pd

        return pd.DataFrame(columns)


def _kept(column: Any) -> Column:
    return column.array if hasattr(column, "array") and not isinstance(column.dtype, np.dtype) else np.asarray(column)


def array_of(rows: Any) -> npt.NDArray[Any]:
    """Of what is no array yet; of ["a", 1] NumPy makes text, in which 1 is no longer 1."""
    array = np.asarray(rows)
    return np.asarray(rows, dtype=object) if array.dtype.kind in "US" else array


def numbers(cells: Any, name: str) -> Floats:
    """Cells of an array, a Series or a frame as float64; pandas' NA becomes NaN.

    Raises:
        InvalidInputError: there is text among them; ``name`` is what the message calls them.
    """
    try:
        if type(cells) is not np.ndarray and hasattr(cells, "to_numpy") and not _is_plain(cells):
            cells = cells.to_numpy(dtype=np.float64, na_value=np.nan)
        return np.asarray(cells, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: text where numbers belong ({error})") from error


def _is_plain(column: Any) -> bool:
    """Whether a Series is one of numpy's numbers."""
    dtype = getattr(column, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"
