"""Layout of values: the order of their dimensions in memory, and which of them share memory.

After the passes, before the memory plan. Images are channels last, all else is row-major. A view (a reshape, a
permutation, a slice) shares its input's memory where strides can express it, and the parts of a concatenation are
written straight into it. Where an operator needs another order than its input has, :func:`lay_out` adds a
:class:`~mlsys_nimble.ir.operators.Copy`.

Pure: no torch, no addresses. Strides and offsets count elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from mlsys_nimble.ir.operators import (
    ROW_MAJOR,
    VIEWS,
    Aten,
    Attention,
    Bf16Product,
    Concat,
    Convolution,
    Copy,
    Expand,
    IntegerProduct,
    Kind,
    Linear,
    Permute,
    Pool,
    Reshape,
    Separable,
    Slice,
)
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.ir.strides import (
    Order,
    Shape,
    Strides,
    channels_last,
    dense,
    has_even_rows,
    is_inner,
    order_of,
    reshaped,
    row_major,
)

BAND_CHANNELS = 7  # images with at most as many: convolutions copy bands of rows (backends/cpu/convolution.h)

Test: TypeAlias = Callable[[Shape, Strides], bool]


@dataclass(frozen=True, slots=True)
class Place:
    """Offset and strides of a value within the memory of its root."""

    root: ValueId  # the value that owns the memory; the value itself, if it owns any
    offset: int  # elements
    strides: Strides  # elements; 0 along expanded dimensions


@dataclass(frozen=True, slots=True)
class Layout:
    """Program whose operators get their inputs in the order that they need, and the place of each value."""

    program: Program  # its inputs and outputs are the caller's tensors; operators copy them
    places: Sequence[Place]  # place by ValueId; constants and the caller's tensors are row-major
    in_place: frozenset[
        int
    ]  # indices of operators that need not run: views, and concatenations (parts may be copied by others)


def lay_out(program: Program) -> Layout:
    """Decide the place of every value.

    Example:
        >>> lay_out(program).places[value].strides  # doctest: +SKIP
        (150528, 1, 672, 3)
    """
    walk = _Walk(program)
    for value in (*program.inputs, *program.constants):
        walk.own(value, row_major(len(program.values[value].shape)))
    for number, value in enumerate(program.inputs):
        order = _input_order(program, value)
        if order != row_major(len(order)):  # else it is read where it lies
            walk.stands_for[value] = walk.copy(value, order, f"input{number}")
    for operator in program.operators:
        walk.visit(operator)
    returned = frozenset(program.inputs) | frozenset(program.constants)
    outputs = tuple(
        value if value in returned else walk.copy(value, row_major(len(program.values[value].shape)), f"output{number}")
        for number, value in enumerate(program.outputs)
    )
    mutations = tuple((buffer, walk.stands_for.get(value, value)) for buffer, value in program.mutations)
    laid = Program(tuple(walk.values), tuple(walk.operators), program.inputs, outputs, program.constants, mutations)
    return _Joining(laid, walk.places, frozenset(walk.in_place)).layout()


def view_place(operator: Operator, place: Place, shape: Shape, wanted: Shape) -> Place | None:
    """Return the place of a view's result within its input's memory; None if no strides express it: it is copied."""
    kind, strides = operator.kind, place.strides
    if isinstance(kind, Permute):
        return replace(place, strides=tuple(strides[dim] for dim in kind.dims))
    if isinstance(kind, Slice):
        moved = list(strides)
        moved[kind.dim] *= kind.step
        return Place(place.root, place.offset + kind.start * strides[kind.dim], tuple(moved))
    if isinstance(kind, Expand):
        added = len(wanted) - len(shape)
        kept = (
            stride if size == after else 0 for size, stride, after in zip(shape, strides, wanted[added:], strict=True)
        )
        return replace(place, strides=(*(0,) * added, *kept))
    found = reshaped(shape, strides, wanted)
    return None if found is None else replace(place, strides=found)


class _Walk:
    """Forward walk that decides orders of dimensions, views, and the copies that operators need."""

    def __init__(self, program: Program) -> None:
        self.values: list[ValueType] = list(program.values)
        self.places: dict[ValueId, Place] = {}
        self.operators: list[Operator] = []
        self.in_place: set[int] = set()
        self.copies: dict[tuple[ValueId, Order], ValueId] = {}
        self.stands_for: dict[ValueId, ValueId] = {}  # copy of each of the caller's tensors

    def own(self, value: ValueId, order: Order) -> None:
        """Give a value memory of its own."""
        self.places[value] = Place(value, 0, dense(self.values[value].shape, order))

    def order(self, value: ValueId) -> Order:
        return order_of(self.values[value].shape, self.places[value].strides)

    def copy(self, value: ValueId, order: Order, name: str) -> ValueId:
        """Add an operator that copies a value into an order of dimensions; return the copy."""
        copied = len(self.values)
        self.values.append(self.values[value])
        self.own(copied, order)
        self.operators.append(Operator(name, Copy(), (value,), (copied,)))
        return copied

    def visit(self, operator: Operator) -> None:
        operator = replace(operator, inputs=tuple(self.stands_for.get(value, value) for value in operator.inputs))
        if isinstance(operator.kind, VIEWS):
            source, result = operator.inputs[0], operator.outputs[0]
            place = view_place(operator, self.places[source], self.values[source].shape, self.values[result].shape)
            if place is not None:
                self.in_place.add(len(self.operators))
                self.places[result] = place
            else:
                self.own(result, row_major(len(self.values[result].shape)))
            self.operators.append(operator)
            return
        inputs = tuple(self._met(operator, index) for index in range(len(operator.inputs)))
        operator = replace(operator, inputs=inputs)
        for value in operator.outputs:
            if value not in self.places:
                self.own(value, self._result_order(operator, value))
        self.operators.append(operator)

    def _met(self, operator: Operator, index: int) -> ValueId:
        """Return the input in an order that the operator takes: itself, or a copy."""
        value = operator.inputs[index]
        shape = self.values[value].shape
        need = _need(operator, index, shape)
        if need is None or need[0](shape, self.places[value].strides):
            return value
        order = need[1]
        if (value, order) not in self.copies:
            self.copies[value, order] = self.copy(value, order, f"{operator.name}_input{index}")
        return self.copies[value, order]

    def _result_order(self, operator: Operator, value: ValueId) -> Order:
        rank = len(self.values[value].shape)
        kind = _in_floats(operator.kind)
        match kind:
            case Convolution() | Separable() | Pool():
                return channels_last(rank)
            case Attention():  # heads are concatenated next
                return (0, 2, 1, 3)
        if isinstance(kind, ROW_MAJOR):
            return row_major(rank)
        for source in operator.inputs:  # the rest takes any order: that of the first input that is as large
            kept = self.values[source].shape
            if len(kept) == rank and self.values[source].numel >= self.values[value].numel > 0:
                return self.order(source)
        for source in operator.inputs:
            if len(self.values[source].shape) == rank and self.order(source) == channels_last(rank):
                return channels_last(rank)
        return row_major(rank)


def _input_order(program: Program, value: ValueId) -> Order:
    """Return channels last if a convolution or pool reads the value, directly or through operators of any order."""
    rank, seen, front = len(program.values[value].shape), {value}, [value]
    consumers = program.consumers()
    while front:
        read = front.pop()
        for index in consumers.get(read, ()):
            operator = program.operators[index]
            if _takes_planes(operator.kind, operator.inputs.index(read), program.values[read].shape):
                continue
            kind = _in_floats(operator.kind)
            if isinstance(kind, Convolution | Separable | Pool):
                return channels_last(rank)
            if isinstance(kind, (*VIEWS, *ROW_MAJOR, Attention)):
                continue
            fresh = [result for result in operator.outputs if result not in seen]
            seen.update(fresh)
            front += fresh
    return row_major(rank)


def _takes_planes(kind: Kind, index: int, shape: Shape) -> bool:
    """Return whether an input is an image of few channels, of which a convolution copies bands in any case."""
    main = kind.main if isinstance(kind, IntegerProduct) else kind
    return isinstance(main, Convolution) and index == 0 and main.groups == 1 and shape[1] <= BAND_CHANNELS


def _in_floats(kind: Kind) -> Kind:
    """Return the kind whose order of dimensions a kind has."""
    return kind.main if isinstance(kind, IntegerProduct | Bf16Product) else kind


def _need(operator: Operator, index: int, shape: Shape) -> tuple[Test, Order] | None:
    """Return the test that an input's strides must pass and the order to copy it into if not; None: any strides do."""
    if _takes_planes(operator.kind, index, shape):
        return None
    kind, rank = _in_floats(operator.kind), len(shape)
    if isinstance(operator.kind, IntegerProduct):  # without scales and parameters
        index -= (index > 1) + (operator.kind.is_dynamic and index > 2 + operator.kind.main.has_bias)
    match kind:
        case Convolution() if index == 0 or index > 1 + kind.has_bias:
            return lambda shape, strides: is_inner(1, shape, strides), channels_last(rank)
        case Separable() if index == 0 or index > kind.num_weights:
            return lambda shape, strides: is_inner(1, shape, strides), channels_last(rank)
        case Pool():
            return lambda shape, strides: is_inner(1, shape, strides), channels_last(rank)
        case Linear() if index == 0 or index > 1 + kind.has_bias:
            return has_even_rows, row_major(rank)
        case Attention() if index in (1, 2):
            return lambda shape, strides: is_inner(rank - 1, shape, strides), row_major(rank)
    return None


class _Joining:
    """Second walk, which places the parts of concatenations inside them."""

    def __init__(self, program: Program, places: dict[ValueId, Place], in_place: frozenset[int]) -> None:
        self.program = program
        self.places = dict(places)
        self.in_place = set(in_place)
        self.apart: dict[int, list[tuple[int, Place]]] = {}  # by concatenation: parts to copy, with their places
        self.producers = program.producers()
        self.consumers = program.consumers()
        self.views: dict[ValueId, list[int]] = {}  # view operators by the value that they read
        for index in sorted(in_place):
            self.views.setdefault(program.operators[index].inputs[0], []).append(index)

    def layout(self) -> Layout:
        # Backwards: a concatenation's own place is final before its parts'.
        for index in reversed(range(len(self.program.operators))):
            operator = self.program.operators[index]
            if isinstance(operator.kind, Concat):
                self._join(index, operator, operator.kind.dim)
        operators: list[Operator] = []
        in_place: set[int] = set()
        values = list(self.program.values)
        for index, operator in enumerate(self.program.operators):
            inputs = list(operator.inputs)
            for position, place in self.apart.get(index, ()):
                copied = len(values)
                values.append(values[inputs[position]])
                self.places[copied] = place
                operators.append(Operator(f"{operator.name}_part{position}", Copy(), (inputs[position],), (copied,)))
                inputs[position] = copied
            if index in self.in_place or isinstance(operator.kind, Concat):
                in_place.add(len(operators))
            operators.append(replace(operator, inputs=tuple(inputs)))
        program = replace(self.program, values=tuple(values), operators=tuple(operators))
        unmade = Place(-1, 0, ())
        return Layout(
            program, tuple(self.places.get(value, unmade) for value in range(len(values))), frozenset(in_place)
        )

    def _join(self, index: int, operator: Operator, dim: int) -> None:
        whole, offset = self.places[operator.outputs[0]], 0
        for position, value in enumerate(operator.inputs):
            place = Place(whole.root, whole.offset + offset * whole.strides[dim], whole.strides)
            offset += self.program.values[value].shape[dim]
            if not (self._is_movable(value, operator, place) and self._moves(value, place)):
                self.apart.setdefault(index, []).append((position, place))

    def _is_movable(self, value: ValueId, concat: Operator, place: Place) -> bool:
        """Return whether a part owns its memory, in the whole's order, appears once, and can be made in place."""
        if value not in self.producers or self.places[value].root != value or concat.inputs.count(value) > 1:
            return False
        if not self._can_be_made(value, place):
            return False
        if self.program.values[value].dtype != self.program.values[concat.outputs[0]].dtype:
            return False
        shape = self.program.values[value].shape
        order = order_of(self.program.values[concat.outputs[0]].shape, self.places[concat.outputs[0]].strides)
        return self.places[value].strides == dense(shape, order)

    def _can_be_made(self, value: ValueId, place: Place) -> bool:
        """Return whether the operator that makes a value can write it with the strides of ``place``."""
        operator, shape = self.program.operators[self.producers[value]], self.program.values[value].shape
        match _in_floats(operator.kind):
            case Aten():
                return False
            case Reshape():  # a copy, which views the result in its input's shape
                return reshaped(shape, place.strides, self.program.values[operator.inputs[0]].shape) is not None
            case Linear():
                return has_even_rows(shape, place.strides)
        return True

    def _moves(self, value: ValueId, place: Place) -> bool:
        """Move a value with its views, if every operator that reads them takes the new strides."""
        moved: dict[ValueId, Place] = {}
        front = [(value, place)]
        while front:
            current, at = front.pop()
            moved[current] = at
            shape = self.program.values[current].shape
            for index in self.consumers.get(current, ()):
                operator = self.program.operators[index]
                if index in self.views.get(current, ()):
                    result = operator.outputs[0]
                    seen = view_place(operator, at, shape, self.program.values[result].shape)
                    if seen is None:
                        return False
                    front.append((result, seen))
                    continue
                for position, source in enumerate(operator.inputs):
                    need = _need(operator, position, shape) if source == current else None
                    if need is not None and not need[0](shape, at.strides):
                        return False
        self.places.update(moved)
        return True
