"""Sizes of requests that an exported program allows: several, as symbols of its dynamic dimensions, or one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

Values = tuple[int, ...]  # one for each dynamic dimension, in the order of Sizes.symbols
Shape = tuple[int, ...]

MOST = 1 << 62  # a larger bound is none


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dynamic dimensions of the inputs of one request, the batch aside.

    A dimension is a number, a symbol, or an expression of symbols such as ``2*s0``: what ``torch.export`` wrote.
    """

    names: tuple[str, ...]  # input names
    axes: tuple[tuple[Any, ...], ...]  # [input][axis after the first]: int or sympy expression
    symbols: tuple[Any, ...]  # those that vary, in the order in which they appear
    bounds: Mapping[Any, tuple[int, int]]  # least and largest value by symbol, both included
    example: Values  # with which the program was exported

    def values(self, shapes: Sequence[Shape]) -> Values:
        """Return the sizes of a request whose inputs have these shapes, without the batch dimension.

        Raises:
            InvalidInputError: A shape does not fit the program, or two inputs contradict each other.
        """
        found: dict[Any, int] = {}
        for name, axes, shape in zip(self.names, self.axes, shapes, strict=True):
            if len(shape) != len(axes):
                raise InvalidInputError(f"input {name!r} takes requests of shape {self.shape_text(axes)}, got {shape}")
            for axis, size in zip(axes, shape, strict=True):
                if not isinstance(axis, int) and axis.is_Symbol:
                    low, high = self.bounds[axis]
                    if not low <= size <= high or found.setdefault(axis, size) != size:
                        raise self._unfit(name, axes, shape, found)
        found |= self._solved(shapes, found)
        for name, axes, shape in zip(self.names, self.axes, shapes, strict=True):
            if tuple(int(axis if isinstance(axis, int) else axis.subs(found)) for axis in axes) != tuple(shape):
                raise self._unfit(name, axes, shape, found)
        return tuple(found[symbol] for symbol in self.symbols)

    def shapes(self, values: Values) -> list[Shape]:
        """Return the shapes of a request's inputs, without the batch dimension."""
        known = dict(zip(self.symbols, values, strict=True))
        return [tuple(int(axis if isinstance(axis, int) else axis.subs(known)) for axis in axes) for axes in self.axes]

    def scaled(self, factor: float) -> Values:
        """Return sizes with about ``factor`` times the example's units, within the bounds."""
        each = factor ** (1 / len(self.symbols))
        return tuple(
            min(max(round(size * each), self.bounds[symbol][0], 1), self.bounds[symbol][1])
            for symbol, size in zip(self.symbols, self.example, strict=True)
        )

    @property
    def length_axes(self) -> list[list[int]] | None:
        """Axes of each input that are the one dynamic dimension itself; None: there are several, or others follow."""
        if len(self.symbols) != 1:
            return None
        plain = [all(isinstance(axis, int) or axis == self.symbols[0] for axis in axes) for axes in self.axes]
        if not all(plain):
            return None
        return [[number for number, axis in enumerate(axes) if axis == self.symbols[0]] for axes in self.axes]

    def describe(self) -> list[str]:
        """Return a line for each input."""
        return [f"{name}: {self.shape_text(axes)}" for name, axes in zip(self.names, self.axes, strict=True)]

    def shape_text(self, axes: Sequence[Any]) -> str:
        """Return a shape with the range of each dynamic dimension."""
        return f"[{', '.join(map(self._axis_text, axes))}]"

    def _axis_text(self, axis: Any) -> str:
        if isinstance(axis, int):
            return str(axis)
        if axis not in self.bounds:
            return str(axis.subs(self._labels))
        low, high = self.bounds[axis]
        return f"{self._labels[axis]}: {low} or more" if high >= MOST else f"{self._labels[axis]}: {low} to {high}"

    @property
    def _labels(self) -> dict[Any, str]:
        """Names of the symbols in messages, instead of the exporter's own."""
        return {symbol: "nmkabcde"[number : number + 1] or str(symbol) for number, symbol in enumerate(self.symbols)}

    def _solved(self, shapes: Sequence[Shape], found: Mapping[Any, int]) -> dict[Any, int]:
        """Return the values of symbols that stand in expressions only."""
        import sympy  # type: ignore[import-untyped]

        solved: dict[Any, int] = {}
        for name, axes, shape in zip(self.names, self.axes, shapes, strict=True):
            for axis, size in zip(axes, shape, strict=True):
                free = set() if isinstance(axis, int) else axis.free_symbols - found.keys() - solved.keys()
                if len(free) == 1:
                    (symbol,) = free
                    known = {**found, **solved}
                    roots = [root for root in sympy.solve(axis.subs(known) - size, symbol) if root.is_Integer]
                    low, high = self.bounds[symbol]
                    if len(roots) != 1 or not low <= int(roots[0]) <= high:
                        raise self._unfit(name, axes, shape, known)
                    solved[symbol] = int(roots[0])
        if len({**found, **solved}) < len(self.symbols):
            raise InvalidInputError(f"shapes {list(shapes)} do not tell the sizes of {'; '.join(self.describe())}")
        return solved

    def _unfit(
        self, name: str, axes: Sequence[Any], shape: Sequence[int], found: Mapping[Any, int]
    ) -> InvalidInputError:
        known = ", ".join(f"{self._labels[symbol]} = {size}" for symbol, size in found.items())
        return InvalidInputError(
            f"input {name!r} takes requests of shape {self.shape_text(axes)}, got {list(shape)}"
            + (f" where {known}" if known else "")
        )


def units_of(values: Values) -> int:
    """Return the size of a request in units: the product of its dynamic dimensions, such as height times width.

    Example:
        >>> units_of((32, 48))
        1536
    """
    return max(1, math.prod(values))


def sizes_of(names: Sequence[str], axes: Sequence[Sequence[Any]], bounds: Mapping[Any, Any], example: Any) -> Sizes:
    """Return the sizes that requests may have.

    Args:
        names: Input names.
        axes: By input and axis after the first: numbers, or expressions of sympy.
        bounds: Ranges by symbol, as in ``ExportedProgram.range_constraints``.
        example: Shapes of the inputs of one request.

    Raises:
        InvalidInputError: The example does not fit.
    """
    symbols = dict.fromkeys(
        symbol
        for each in axes
        for axis in each
        if not isinstance(axis, int)
        for symbol in sorted(axis.free_symbols, key=str)
    )
    ranges = {}
    for symbol in symbols:
        known = bounds.get(symbol)
        low, high = (1.0, float(MOST)) if known is None else (float(known.lower), float(known.upper))
        ranges[symbol] = (max(1, int(max(low, 1.0))), int(min(high, MOST)))
    found = Sizes(tuple(names), tuple(map(tuple, axes)), tuple(symbols), ranges, ())
    return Sizes(found.names, found.axes, found.symbols, ranges, found.values(example) if symbols else ())


_FIX = "export it with only the first dimension dynamic"


def fixed_example(
    path: Path, program: torch.export.ExportedProgram, args: Sequence[Tensor] | None, given: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Return the inputs of one request, ``[1, ...]`` each.

    Args:
        path: Path of the file, for messages.
        program: Exported for any batch size.
        args: Inputs that fit it; None: none are known.
        given: Input of the shape that was asked for; None: the program's own.

    Raises:
        InvalidInputError: It does not allow the shape that was asked for.
    """
    inputs = _inputs(program)
    allowed = {node.name: [_bounds(program, size) for size in node.meta["val"].shape] for node in inputs}
    if given is None:
        assert args is not None
        return tuple(value[:1] for value in args)
    if len(allowed) != len(given):
        raise InvalidInputError(
            f"{path} takes {len(allowed)} inputs, and --shape is the shape of one: leave it out; if a dimension of the "
            f"inputs is dynamic, {_FIX}"
        )
    made = []
    for (name, sizes), value, node in zip(allowed.items(), given, inputs, strict=True):
        fits = len(sizes) == value.ndim and all(
            least <= size <= most for size, (least, most) in zip(value.shape[1:], sizes[1:], strict=True)
        )
        if not fits:
            wanted = ", ".join(_range(*each) for each in sizes[1:])
            raise InvalidInputError(
                f"{path}: input {name!r} takes requests of shape ({wanted}), got {list(value.shape[1:])}"
            )
        dtype = node.meta["val"].dtype
        made.append(value.to(dtype) if dtype.is_floating_point else torch.zeros(value.shape, dtype=dtype))
    return tuple(made)


def dynamic_sizes(program: torch.export.ExportedProgram, args: Sequence[Tensor]) -> Sizes | None:
    """Return the sizes that requests may have; None: all have one shape.

    Args:
        program: Exported for any batch size.
        args: Inputs that fit it, ``[requests, ...]`` each.
    """
    inputs = _inputs(program)
    axes = [
        [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape[1:]] for node in inputs
    ]
    shapes = [tuple(value.shape[1:]) for value in args]
    sizes = sizes_of([node.name for node in inputs], axes, program.range_constraints, shapes)
    return sizes if sizes.symbols else None


def vocabularies(module: torch.fx.GraphModule) -> list[int | None]:
    """Return the exclusive upper bound of each input's integers: rows of the table that it indexes; None: unknown."""
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    found: list[int | None] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        tables = [
            weights[str(user.args[0].target)].shape[0]
            for user in node.users
            if user.target is torch.ops.aten.embedding.default and str(user.args[0].target) in weights
        ]
        found.append(int(min(tables)) if tables else None)
    return found


def _inputs(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def _bounds(program: torch.export.ExportedProgram, size: Any) -> tuple[float, float]:
    """Return the least and the largest value of a dimension."""
    if isinstance(size, int):
        return size, size
    known = program.range_constraints.get(size.node.expr)
    if known is None:  # follows from other dimensions
        return 0, float("inf")
    return float(known.lower), float(known.upper)


def _range(least: float, most: float) -> str:
    if least == most:
        return f"{least:g}"
    return f"{least:g} or more" if most > 1 << 62 else f"{least:g} to {most:g}"
