"""Raw rows to the inputs of an ONNX file that takes columns by name, and its refusals back to one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.checks.table import no_rows
from mlsys_windtunnel.export.exported import TIES
from mlsys_windtunnel.export.host_parts import MISSING_TEXTS, ColumnType
from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.host.lookup import is_missing
from mlsys_windtunnel.host.raw_table import PlainTable, Table, numbers, raw
from mlsys_windtunnel.module import METHODS, ROWS_PER_CHUNK
from mlsys_windtunnel.modules.ties import UndecidedError

ARRAY = "X"  # the one input of a pipeline that was fitted on an array of numbers
Feed = dict[str, npt.NDArray[Any]]
_REFUSAL = re.compile(r"Name:'(.*?)(?: \(\d+\))?' Status Message: indices element out of data bounds")


@dataclass(frozen=True)
class ColumnsPipeline:
    """A file that takes raw columns: rows in, answers out, as the source's methods take and give them."""

    run: Callable[[Sequence[str], Feed], Sequence[npt.NDArray[Any]]]  # names of outputs, inputs by name
    outputs: Mapping[str, str]  # method to output
    has_ties: bool
    columns: Sequence[Mapping[str, Any]]  # name, type and place in the source's input of each
    classes: tuple[object, ...]
    frontend: Frontend

    @property
    def answers(self) -> tuple[str, ...]:
        """The methods that the file holds."""
        return tuple(self.outputs)

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The labels of a classifier; empty otherwise."""
        return np.asarray(self.classes)

    def answer(self, method: str, x: Table) -> npt.NDArray[Any]:
        """Return the answer of a method for raw rows."""
        places = [each["place"] for each in self.columns]
        given = self.frontend.columns_of(x, method, read=places)
        table = given if given.is_by_column else PlainTable(raw(given.whole))
        cells = table.cells(places)
        num_rows = len(cells[0])
        if not num_rows:
            raise no_rows((0, len(cells)))
        feed = {each["name"]: _typed(each, column) for each, column in zip(self.columns, cells, strict=True)}
        if self.frontend.columns is None and all(each["type"] == "double" for each in self.columns):
            whole = np.zeros((num_rows, self.frontend.width or 0))
            whole[:, places] = np.concatenate(list(feed.values()), axis=1)
            feed = {ARRAY: whole}
        wanted = [self.outputs[method], *([TIES] if self.has_ties else [])]
        parts = []
        for start in range(0, num_rows, ROWS_PER_CHUNK):
            part = self.run(wanted, {name: column[start : start + ROWS_PER_CHUNK] for name, column in feed.items()})
            if self.has_ties and part[1].any():
                raise UndecidedError((start + np.flatnonzero(part[1])).tolist())
            parts.append(part[0])
        return np.concatenate(parts)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS and name in self.outputs:
            return lambda x: self.answer(name, x)
        if name in METHODS:
            raise AttributeError(f"this file has no {name}; it holds {', '.join(self.outputs)}")
        raise AttributeError(name)


def refusal_of(error: Exception) -> str | None:
    """Return the refusal that a runtime's error names; None if it is another error."""
    found = _REFUSAL.search(str(error))
    return None if found is None else found[1]


def _typed(column: Mapping[str, Any], cells: Any) -> npt.NDArray[Any]:
    """Return a column ``[rows, 1]`` in its type.

    Raises:
        InvalidInputError: a cell is of another type.
    """
    name, kind = str(column["name"]), column["type"]
    array = np.asarray(cells)
    if kind in ("double", "float"):
        wide = numbers(cells if hasattr(cells, "to_numpy") else array, name)
        return wide.astype(np.float64 if kind == "double" else np.float32)[:, None]
    if kind == "string":
        return np.array([[_text(name, cell)] for cell in array.tolist()], object)
    found: list[Any] = array.tolist()
    if kind == "int64":
        found = [int(cell) if type(cell) is float and cell.is_integer() else cell for cell in found]
    for cell in found:
        is_of_kind = type(cell) is bool if kind == "bool" else type(cell) is int and -(1 << 63) <= cell < 1 << 63
        if not is_of_kind:
            raise _wrong(name, kind, cell)
    return np.array(found, np.bool_ if kind == "bool" else np.int64)[:, None]


def _text(name: str, cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    if cell is None or is_missing(cell):
        return next(text for text, value in MISSING_TEXTS.items() if (cell is None) == (value is None))
    raise _wrong(name, "string", cell)


def _wrong(name: str, kind: ColumnType | str, cell: object) -> InvalidInputError:
    return InvalidInputError(f"column {name} of this file is of type {kind}, and the input holds {cell!r:.60}")
