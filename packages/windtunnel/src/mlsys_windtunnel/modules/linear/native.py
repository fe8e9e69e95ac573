"""Linear maps of one output by the kernel, over numbers and over codes that stand for rows of tables."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.native import new
from mlsys_windtunnel.modules.native import address

Floats = npt.NDArray[np.float64]
Guard = Callable[[Sequence[Floats]], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one table that the map reads."""

    of: Floats  # [columns]; of codes what each row of each column's table adds, [rows of all columns]
    first: npt.NDArray[np.int64] | None = None  # [columns] of codes: where a column's rows begin; None for numbers


class NativeLinear:
    """``bias + sum over tables of what their cells add``.

    Args:
        library: The kernel.
        weights: Weights of each table.
        bias: Bias of the output.
        guard: Looks at the tables and may refuse them; called where a value of the map is not finite, or very large.
    """

    def __init__(self, library: Any, weights: Sequence[Weights], bias: float, *, guard: Guard | None = None) -> None:
        structs = library.structs
        pieces = []
        self._arrays = []  # kept, since the kernel is given their addresses
        for each in weights:
            of = np.ascontiguousarray(each.of)
            self._arrays += [of, each.first]
            num_columns = len(of if each.first is None else each.first)
            first = None if each.first is None else each.first.ctypes.data
            pieces.append(new(structs["Piece"], num_columns=num_columns, weight=of.ctypes.data, first=first))
        array = (structs["Piece"] * len(pieces))(*pieces)
        self._pieces = array, ctypes.addressof(array)
        # Each call packs these three of each table, which is quicker than to fill structs.
        assert [name for name, _ in structs["Table"]._fields_] == ["data", "row_bytes", "column_bytes"]
        self._tables = struct.Struct(f"{3 * len(weights)}q")
        self._bias = bias
        self._guard = guard
        self._linear = library.mlsys_linear

    def __call__(self, *tables: Floats, slope: float = 0.0) -> Floats:
        """Return ``[rows, 1]`` from tables ``[rows, columns]``; codes are whole numbers.

        Args:
            tables: In the order of their weights.
            slope: If not 0, probabilities of two classes are answered, ``[rows, 2]``: the logistic function of the
                values times this number, after what they lack to 1.
        """
        num_rows = len(tables[0])
        locations: list[int] = []
        for table in tables:
            locations.append(address(table))
            locations += table.strides
        out = np.empty((num_rows, 2 if slope else 1))
        where = self._tables.pack(*locations)
        is_wild = self._linear(self._pieces[1], where, len(tables), self._bias, num_rows, slope, address(out))
        if is_wild and self._guard is not None:
            self._guard(tables)
        return out
