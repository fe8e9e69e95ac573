"""The program under construction, to which the rules append operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from mlsys_nimble.capture.sources import Site
from mlsys_nimble.errors import refuse
from mlsys_nimble.ir.operators import (
    Aten,
    Cast,
    Concat,
    Copy,
    Expand,
    Kind,
    Pad,
    Permute,
    Pointwise,
    Reshape,
    Slice,
    Step,
)
from mlsys_nimble.ir.program import ITEMSIZE, Operator, ValueId, ValueType
from mlsys_nimble.ir.sizes import is_varying

FLOATS = ("float32", "float64", "float16", "bfloat16")  # dtypes for which kinds have a floating form

_WAY = "Prepare with fallback='eager' to run that part eagerly."


class NoKindError(Exception):
    """Error in a rule that no kind of operator can express; torch then runs the operator. Never leaves capture."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Value of the program under construction."""

    value: ValueId
    type: ValueType

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        return self.type.shape

    @property
    def dtype(self) -> str:
        """Return the dtype by torch's name."""
        return self.type.dtype

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.type.shape)


_MOVERS = (Aten, Cast, Concat, Copy, Expand, Pad, Permute, Reshape, Slice)  # these take any dtype


def _holds(dtype: str, number: float) -> bool:
    """Return whether a number is a value of a dtype, within rounding for floats."""
    if dtype == "bool":
        return number in (0, 1)
    if dtype in FLOATS or dtype.startswith("complex"):
        return not math.isfinite(number) or abs(number) <= torch.finfo(getattr(torch, dtype)).max
    info = torch.iinfo(getattr(torch, dtype))
    return info.min <= number <= info.max and number == int(number)


def _types(refs: Sequence[Ref]) -> list[ValueType]:
    return [ref.type for ref in refs]


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that all of these broadcast to."""
    if any(map(is_varying, map(tuple, shapes))):
        rank = max(map(len, shapes))
        padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
        return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))
    return np.broadcast_shapes(*map(tuple, shapes))  # torch's own imports sympy, a third of a first preparation


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: ``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def type_of(tensor: torch.Tensor, source: str = "") -> ValueType:
    """Return a tensor's type.

    Raises:
        CaptureError: a program cannot hold the tensor: it is sparse, quantised or of an unusual dtype.
    """
    name = dtype_name(tensor.dtype)
    if name not in ITEMSIZE or tensor.layout is not torch.strided:
        what = f"a tensor of dtype {name} and layout {str(tensor.layout).removeprefix('torch.')}"
        raise refuse(what, source, f"Nimble takes dense tensors of {', '.join(ITEMSIZE)}. {_WAY}")
    return ValueType(tuple(tensor.shape), name)


class Builder:
    """Program under construction: its values, operators and constants.

    Args:
        device: Where its tensors are.
        is_general: Operators that do nothing at these sizes, such as a slice of all, are kept: they may at others.
    """

    def __init__(self, device: torch.device, *, is_general: bool = False) -> None:
        self.device = device
        self._is_general = is_general
        self.values: list[ValueType] = []
        self.operators: list[Operator] = []
        self.constants: dict[ValueId, torch.Tensor] = {}
        self.site = Site()  # source of the operators being emitted
        self.parameters: dict[tuple[ValueId, ValueId], Ref] = {}  # float32 [2] by (scale, zero point)
        self._fixed: set[ValueId] = set()
        self._num_named: dict[str, int] = {}
        self._producer: dict[ValueId, Operator] = {}

    def new_value(self, type_: ValueType) -> Ref:
        """Add a value that no operator makes yet."""
        self.values.append(type_)
        return Ref(len(self.values) - 1, type_)

    def constant(self, tensor: torch.Tensor) -> Ref:
        """Add a constant that is ``tensor`` itself, not a copy."""
        ref = self.new_value(type_of(tensor, self.site.source))
        self.constants[ref.value] = tensor
        self._fixed.add(ref.value)
        return ref

    def is_fixed(self, ref: Ref) -> bool:
        """Return whether a value depends on constants alone, so that constant folding may make it one."""
        return ref.value in self._fixed

    def producer(self, ref: Ref) -> Operator | None:
        """Return the operator that makes a value; None for inputs and constants."""
        return self._producer.get(ref.value)

    def emit_many(
        self, kind: Kind, inputs: Sequence[Ref], types: Sequence[ValueType], *, is_pure: bool = True
    ) -> list[Ref]:
        """Append an operator of several results."""
        if not isinstance(kind, _MOVERS) and any(t.dtype.startswith("complex") for t in (*_types(inputs), *types)):
            raise NoKindError(f"{type(kind).__name__} of complex numbers")
        outputs = [self.new_value(type_) for type_ in types]
        operator = Operator(
            self._unique_name(kind),
            kind,
            tuple(ref.value for ref in inputs),
            tuple(ref.value for ref in outputs),
            self.site.source,
        )
        self.operators.append(operator)
        for ref in outputs:
            self._producer[ref.value] = operator
        if is_pure and self._fixed.issuperset(operator.inputs):
            self._fixed.update(operator.outputs)
        return outputs

    def emit(self, kind: Kind, inputs: Sequence[Ref], type_: ValueType) -> Ref:
        """Append an operator of one result."""
        return self.emit_many(kind, inputs, [type_])[0]

    def full(self, type_: ValueType, value: float | int | bool) -> Ref:
        """Fill a tensor with one value; folded later."""
        keywords = (("dtype", getattr(torch, type_.dtype)), ("device", self.device))
        return self.emit(Aten("aten.full.default", (type_.shape, value), keywords), [], type_)

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Reshape ``x``; return ``x`` itself where it has that shape."""
        if tuple(shape) == x.shape and not self._is_general:
            return x
        assert prod(shape) == x.type.numel, (shape, x)
        return self.emit(Reshape(), [x], ValueType(tuple(shape), x.dtype))

    def permute(self, x: Ref, dims: Sequence[int]) -> Ref:
        """Reorder the dimensions; return ``x`` itself where the order is the same."""
        dims = tuple(dim % x.rank for dim in dims)
        if dims == tuple(range(x.rank)):
            return x
        return self.emit(Permute(dims), [x], ValueType(tuple(x.shape[dim] for dim in dims), x.dtype))

    def transpose(self, x: Ref) -> Ref:
        """Exchange the last two dimensions."""
        return self.permute(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])

    def slice(self, x: Ref, dim: int, start: int, length: int, step: int = 1) -> Ref:
        """Take ``length`` elements of ``dim``; return ``x`` itself where that is all of them."""
        if start == 0 and step == 1 and length == x.shape[dim] and not self._is_general:
            return x
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        return self.emit(Slice(dim, start, step), [x], ValueType(shape, x.dtype))

    def select(self, x: Ref, dim: int, index: int) -> Ref:
        """Take one element of ``dim``, and drop that dimension."""
        return self.reshape(self.slice(x, dim, index, 1), x.shape[:dim] + x.shape[dim + 1 :])

    def expand(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Broadcast to ``shape``; return ``x`` itself where it has that shape."""
        if tuple(shape) == x.shape and not self._is_general:
            return x
        return self.emit(Expand(), [x], ValueType(tuple(shape), x.dtype))

    def concat(self, parts: Sequence[Ref], dim: int) -> Ref:
        """Concatenate along ``dim``; return a single part as it is."""
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return self.emit(Concat(dim), parts, ValueType(tuple(shape), parts[0].dtype))

    def cast(self, x: Ref, dtype: str) -> Ref:
        """Cast to a dtype; return ``x`` itself where it has that dtype."""
        return x if x.dtype == dtype else self.emit(Cast(), [x], ValueType(x.shape, dtype))

    def pointwise(self, op: str, *arguments: Ref | float, dtype: str | None = None, result: str | None = None) -> Ref:
        """Emit one elementwise operation over tensors and numbers, computed in ``dtype`` (default: the first tensor's).

        Raises:
            NoKindError: numbers are complex, or a step's float constant or ``dtype`` cannot hold them.
        """
        if any(not isinstance(a, Ref) and (isinstance(a, complex) or float(a) != a == a) for a in arguments):
            raise NoKindError(f"{op} with {arguments}")
        inputs = [argument for argument in arguments if isinstance(argument, Ref)]
        indices = iter(range(len(inputs)))
        step = Step(op, tuple(next(indices) if isinstance(a, Ref) else float(a) for a in arguments))
        dtype = dtype or inputs[0].dtype
        numbers = [argument for argument in arguments if not isinstance(argument, Ref)]
        is_bool = all(ref.dtype == "bool" for ref in inputs)
        if (is_bool and dtype not in ("bool", *FLOATS)) or any(not _holds(dtype, number) for number in numbers):
            raise NoKindError(f"{op} with {arguments}")  # torch takes a number in the tensors' dtype first
        if is_bool:
            dtype = "float32"
        shape = broadcast(*(ref.shape for ref in inputs))
        return self.emit(Pointwise((step,), dtype), inputs, ValueType(shape, result or dtype))

    def _unique_name(self, kind: Kind) -> str:
        label: Any = kind.target.split(".")[1] if isinstance(kind, Aten) else _label(kind)
        name = f"{self.site.path}.{label}" if self.site.path else label
        count = self._num_named[name] = self._num_named.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}_{count - 1}")

    def _unique(self, name: str) -> str:
        """Return ``name``, with underscores appended until it is new."""
        while name in self._num_named:
            name += "_"
        self._num_named[name] = 1
        return name


def _label(kind: Kind) -> str:
    if isinstance(kind, Pointwise):
        return kind.steps[-1].op
    return type(kind).__name__.lower()
