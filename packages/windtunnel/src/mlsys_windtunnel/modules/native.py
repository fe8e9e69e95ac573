"""The C++ kernel of trees and linear models: what answers without gradients, on a CPU in float64.

The kernel is ``native/models.cpp``; where there is no compiler, numpy and torch answer.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError
from mlsys_core.native import Kernel, bind, new, warn_without_kernels

from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.layout import lay_out

MODELS = Kernel(Path(__file__).parent.parent / "native" / "models.cpp")


@lru_cache(maxsize=1)
def kernel() -> Any:
    """Load the compiled kernel; the first call ever on a machine builds it (seconds). None where that fails."""
    try:
        return bind(MODELS.load())
    except KernelUnavailableError as error:
        warn_without_kernels("WindTunnel", "numpy and torch answer, in several times the time", error)
        return None


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first number.

    Quicker than ``array.ctypes.data`` where the array is contiguous and writable.
    """
    try:
        return ctypes.addressof(ctypes.c_double.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, strided or empty
        return array.ctypes.data


ZERO = float(np.float32(1e-35))  # LightGBM's kZeroThreshold: what is no larger counts as zero


class NativeTrees:
    """An ensemble laid out for the kernel.

    Args:
        library: The kernel.
        ensemble: The trees.
        bias: ``[outputs]`` or None; as in :class:`.trees.Trees`, like the rest.
    """

    def __init__(
        self,
        library: Any,
        ensemble: TreeEnsemble,
        *,
        bias: npt.NDArray[np.float64] | None = None,
        num_groups: int = 1,
        divisor: float = 1.0,
    ) -> None:
        layout = lay_out(ensemble)
        arrays = {
            **{name: getattr(layout, name) for name in ("nodes", "features", "edges", "root", "leaf")},
            **{name: getattr(layout, name) for name in ("set_start", "set_size", "member")},
            "leaf_value": np.ascontiguousarray(ensemble.leaf_value),
            "bias": bias,
        }
        self._arrays = arrays  # kept, since the kernel is given their addresses
        self._record = new(
            library.structs["Ensemble"],
            **{name: None if array is None else array.ctypes.data for name, array in arrays.items()},
            divisor=divisor,
            zero=ZERO,
            num_nodes=len(layout.nodes),
            num_features=len(layout.features),
            num_columns=layout.num_columns,
            num_trees=ensemble.num_trees,
            num_outputs=ensemble.num_outputs,
            num_groups=num_groups,
            is_wide=layout.is_wide,
            has_categories=bool(layout.set_size.any()),
            rounds_to_float32=ensemble.rounds_to_float32,
        )
        self._address = ctypes.addressof(self._record)
        self._num_features = ensemble.num_features
        self._width = num_groups if num_groups > 1 else ensemble.num_outputs
        self._sum_trees = library.mlsys_sum_trees

    def __call__(self, x: npt.NDArray[np.float64], *, slope: float = 0.0) -> npt.NDArray[np.float64]:
        """Return ``[rows, outputs]`` from inputs ``[rows, features]``.

        Args:
            x: The inputs.
            slope: If not 0, probabilities ``[rows, 2]`` are answered: the logistic function of the sums of one output
                times this number, after what they lack to 1.
        """
        x = np.ascontiguousarray(x)
        num_rows, num_features = x.shape
        if num_features < self._num_features:
            raise InvalidInputError(f"the trees read {self._num_features} columns; the table has {num_features}")
        out = np.empty((num_rows, 2 if slope else self._width))
        num_threads = torch.get_num_threads()
        self._sum_trees(self._address, address(x), num_rows, num_features, num_threads, slope, address(out))
        return out


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
        """Return ``[rows, 1]`` from tables ``[rows, columns]``; codes are integers.

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
