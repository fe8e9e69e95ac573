"""Facts about a cell that are known without running it: its ports, its batch sizes, its priority.

The pure half of a cell; the module that computes is in :mod:`mlsys_batchmaker.cells.cell`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError

Signature: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape of one row

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
DTYPES = ("float32", "float64", "float16", "int64", "int32", "bool")
_DTYPES = {name: np.dtype(name) for name in DTYPES}
# The same memory: what was below 0 is above all others, so one comparison finds both.
_UNSIGNED = {name: np.dtype(f"u{_DTYPES[name].itemsize}") for name in DTYPES if name.startswith("int")}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a cell.

    Raises:
        InvalidInputError: the name, dtype or shape is none, or ``high`` is given for numbers that are not whole.
    """

    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...] = ()  # shape of one row, without the batch dimension
    high: int | None = None  # whole numbers lie in [0, high), such as the words of a vocabulary; None: not checked

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(f"port name {self.name!r}: letters, digits and _ only, beginning with a letter")
        if self.dtype not in DTYPES:
            raise InvalidInputError(f"port {self.name!r} has dtype {self.dtype!r}: one of {', '.join(DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise InvalidInputError(f"port {self.name!r} has the row shape {self.shape}: sizes are at least 1")
        if self.high is not None and (self.high < 1 or not self.dtype.startswith("int")):
            raise InvalidInputError(f"port {self.name!r}: high={self.high} bounds whole numbers, and is at least 1")

    @property
    def signature(self) -> Signature:
        """Dtype and shape; values of equal signature can stand for each other."""
        return self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize

    def check(self, rows: np.ndarray, count: int | None = None) -> np.ndarray:
        """Return ``rows`` as [count, *shape] of this port's dtype; None: however many there are.

        Raises:
            InvalidInputError: another shape, a dtype that does not convert, a number out of range or not finite.
        """
        rows = np.asarray(rows)
        if rows.shape[1:] != self.shape or rows.ndim == 0:
            raise InvalidInputError(f"{self.name}: rows of shape {self.shape} are needed, got {rows.shape[1:]}")
        if rows.dtype != _DTYPES[self.dtype]:
            if not np.can_cast(rows.dtype, self.dtype, casting="same_kind"):
                raise InvalidInputError(f"{self.name}: {self.dtype} is needed, got {rows.dtype}")
            rows = rows.astype(self.dtype)
        if self.high is not None and rows.size and rows.view(_UNSIGNED[self.dtype]).max() >= self.high:
            raise InvalidInputError(
                f"{self.name}: numbers must lie in [0, {self.high}), got {rows.min()} to {rows.max()}"
            )
        if self.dtype.startswith("float") and not np.isfinite(rows).all():
            raise InvalidInputError(f"{self.name}: every number must be finite, and some are NaN or infinite")
        if count is not None and len(rows) != count:
            raise InvalidInputError(f"{self.name}: {count} rows are needed, one for each node, got {len(rows)}")
        return rows


@dataclass(frozen=True, slots=True)
class Stop:
    """A chain of the cell ends after the step that gives ``value``: the end-of-sequence symbol of a decoder."""

    output: int  # which output, a whole number per row
    value: int


@dataclass(frozen=True, slots=True)
class CellSpec:
    """A cell type, as the scheduler sees it (BatchMaker, section 4.1).

    Raises:
        InvalidInputError: names are not unique, or a number is out of range.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    results: tuple[int, ...] = (0,)  # the outputs that a request gets of a node it asks for
    stop: Stop | None = None
    priority: int = 0  # larger goes first: cells that come later in a graph (section 4.3)
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES  # Bsizes, rising; others are padded up to the next

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(f"cell name {self.name!r}: letters, digits and _ only, beginning with a letter")
        for kind, ports in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not ports or len({port.name for port in ports}) < len(ports):
                raise InvalidInputError(f"cell {self.name!r}: its {kind} need names of their own, and at least one")
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise InvalidInputError(f"cell {self.name!r}: batch sizes must rise from at least 1, got {sizes}")
        wanted = (*self.results, *(() if self.stop is None else (self.stop.output,)))
        if any(not 0 <= output < len(self.outputs) for output in wanted):
            raise InvalidInputError(f"cell {self.name!r} has {len(self.outputs)} outputs, and {wanted} are asked for")
        if self.stop is not None and self.stop.output not in self.results:
            raise InvalidInputError(f"cell {self.name!r}: the output that stops a chain must be among its results")
        if self.stop is not None and (
            self.outputs[self.stop.output].shape or not self.outputs[self.stop.output].dtype.startswith("int")
        ):
            raise InvalidInputError(f"cell {self.name!r}: what stops a chain is one whole number a row")

    @property
    def max_batch_size(self) -> int:
        """Largest supported batch size (Bsizes.Max())."""
        return self.batch_sizes[-1]

    @property
    def min_batch_size(self) -> int:
        """Smallest supported batch size (Bsizes.Min())."""
        return self.batch_sizes[0]

    def padded(self, size: int) -> int:
        """Return the smallest supported batch size that takes ``size`` rows."""
        return next(supported for supported in self.batch_sizes if supported >= size)

    def input_index(self, name: str) -> int:
        """Return the position of the input called ``name``.

        Raises:
            InvalidInputError: there is none.
        """
        return _index(self.inputs, name, f"cell {self.name!r} has no input")

    def output_index(self, name: str) -> int:
        """Return the position of the output called ``name``.

        Raises:
            InvalidInputError: there is none.
        """
        return _index(self.outputs, name, f"cell {self.name!r} has no output")


def _index(ports: tuple[Port, ...], name: str, says: str) -> int:
    for index, port in enumerate(ports):
        if port.name == name:
            return index
    raise InvalidInputError(f"{says} {name!r}: {', '.join(port.name for port in ports)}")
