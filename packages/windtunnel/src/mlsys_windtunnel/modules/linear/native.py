"""Linear maps of one output by the kernel, over numbers and over codes that stand for rows of tables."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.modules.native import address

Floats = npt.NDArray[np.float64]
Guard = Callable[[Sequence[Floats]], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one table that the map reads."""

    of: Floats  # [columns]; of codes what each row of each column's table adds, [rows of all columns]
    first: npt.NDArray[np.int64] | None = None  # [columns] of codes: where a column's rows begin; None for numbers


class _Piece(ctypes.Structure):
    """Struct of models.cpp."""

    _fields_ = (("num_columns", ctypes.c_int64), ("weight", ctypes.c_void_p), ("first", ctypes.c_void_p))


class NativeLinear:
    """``bias + sum over tables of what their cells add``.

    Args:
        library: The kernel.
        weights: Weights of each table.
        bias: Bias of the output.
        guard: Looks at the tables and may refuse them; called where a value of the map is not finite, or very large.
    """

    def __init__(
        self, library: ctypes.CDLL, weights: Sequence[Weights], bias: float, *, guard: Guard | None = None
    ) -> None:
        pieces = (_Piece * len(weights))()
        self._arrays = []  # kept, since the kernel is given their addresses
        for piece, each in zip(pieces, weights, strict=True):
            of = np.ascontiguousarray(each.of)
            self._arrays += [of, each.first]
            piece.num_columns = len(of if each.first is None else each.first)
            piece.weight = of.ctypes.data
            piece.first = None if each.first is None else each.first.ctypes.data
        self._pieces = pieces, ctypes.addressof(pieces)
        self._tables = struct.Struct(f"{3 * len(weights)}q")  # as in models.cpp: of each an address and two strides
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
