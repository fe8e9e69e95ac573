"""The program in a form that passes change in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mlsys_nimble.backends.reference.operators import aten_function
from mlsys_nimble.ir.operators import VIEWS, Aten, Copy, Kind
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType


class Rewriter:
    """Program under change: operators are replaced or dropped, values substituted, constants added.

    Operators keep their positions: a replacement takes the position of the last operator that it replaces.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = list(program.values)
        self.operators: list[list[Operator]] = [
            [operator] for operator in program.operators
        ]  # by position; empty: dropped
        self.constants = dict(program.constants)
        self.kept = program.kept()
        self.lasting = _seen_by_the_caller(program)
        self._mutated = {old for old, _ in program.mutations}
        self._stands_for: dict[ValueId, ValueId] = {}
        self._position = program.producers()
        self._num_uses = _count_uses(program)

    def __iter__(self) -> Iterator[tuple[int, Operator]]:
        """Yield positions and current operators in order, without those inserted at the position being visited."""
        for position in range(len(self.operators)):
            for operator in tuple(self.operators[position]):
                yield position, self._current(operator)

    def at(self, position: int) -> Operator | None:
        """Return the operator at ``position`` now; None if it was dropped."""
        return self._current(self.operators[position][-1]) if self.operators[position] else None

    def resolve(self, value: ValueId) -> ValueId:
        """Return the value that now replaces ``value``, or ``value`` itself."""
        while value in self._stands_for:
            value = self._stands_for[value]
        return value

    def constant(self, value: ValueId) -> Any:
        """Return the tensor of a constant that no call changes, or None."""
        value = self.resolve(value)
        return None if value in self._mutated else self.constants.get(value)

    def producer(self, value: ValueId) -> Operator | None:
        """Return the operator that makes ``value`` now; None for inputs and constants."""
        value = self.resolve(value)
        for operator in self.operators[self._position[value]] if value in self._position else ():
            if value in operator.outputs:
                return self._current(operator)
        return None

    def sole_producer(self, value: ValueId) -> Operator | None:
        """Return the operator that makes ``value`` for one reader; None if others, or the caller, read it too."""
        value = self.resolve(value)
        operator = self.producer(value)
        is_shared = self._num_uses.get(value, 0) != 1 or value in self.kept
        return None if operator is None or is_shared or len(operator.outputs) != 1 else operator

    def type(self, value: ValueId) -> ValueType:
        """Return a value's type."""
        return self.values[self.resolve(value)]

    def add_constant(self, tensor: torch.Tensor) -> ValueId:
        """Add a constant."""
        self.values.append(ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        self.constants[len(self.values) - 1] = tensor
        return len(self.values) - 1

    def insert(self, position: int, name: str, kind: Kind, inputs: Sequence[ValueId], type_: ValueType) -> ValueId:
        """Insert an operator just before the one at ``position``; return its result."""
        self.values.append(type_)
        value = len(self.values) - 1
        operator = Operator(name, kind, tuple(inputs), (value,), self.operators[position][-1].source)
        self.operators[position].insert(-1, operator)
        self._position[value] = position
        self._use(operator.inputs, 1)
        return value

    def replace(self, position: int, operator: Operator) -> None:
        """Replace the operator at ``position`` by ``operator``, which has the same results."""
        self._use(self._current(self.operators[position][-1]).inputs, -1)
        self.operators[position][-1] = operator
        self._use(operator.inputs, 1)

    def drop(self, operator: Operator) -> None:
        """Remove an operator whose result nothing reads any more."""
        for position in {self._position[value] for value in operator.outputs}:
            self.operators[position] = [one for one in self.operators[position] if one.outputs != operator.outputs]
        self._use(operator.inputs, -1)

    def substitute(self, operator: Operator, by: ValueId) -> None:
        """Drop ``operator``, and let ``by`` replace its result."""
        value, by = operator.outputs[0], self.resolve(by)
        self.drop(operator)
        self._stands_for[value] = by
        self._num_uses[by] = self._num_uses.get(by, 0) + self._num_uses.pop(value, 0)
        if value in self.kept:
            self.kept |= {by}

    def build(self) -> Program:
        """Return the changed program."""
        operators = tuple(operator for _, operator in self)
        outputs = tuple(map(self.resolve, self.program.outputs))
        mutations = tuple((old, self.resolve(new)) for old, new in self.program.mutations)
        used = {value for operator in operators for value in operator.inputs}
        used.update(outputs, *mutations)
        constants = {value: tensor for value, tensor in self.constants.items() if value in used}
        return Program(tuple(self.values), operators, self.program.inputs, outputs, constants, mutations)

    def _current(self, operator: Operator) -> Operator:
        inputs = tuple(map(self.resolve, operator.inputs))
        if inputs == operator.inputs:
            return operator
        return Operator(operator.name, operator.kind, inputs, operator.outputs, operator.source)

    def _use(self, values: Sequence[ValueId], amount: int) -> None:
        for value in {self.resolve(value) for value in values}:
            self._num_uses[value] = self._num_uses.get(value, 0) + amount


def _count_uses(program: Program) -> dict[ValueId, int]:
    return {value: len(readers) for value, readers in program.consumers().items()}


def _seen_by_the_caller(program: Program) -> frozenset[ValueId]:
    """Return the values that may share memory with a result or a buffer's new value: views must not be merged there."""
    lasting = set(program.kept())
    for operator in reversed(program.operators):
        if isinstance(operator.kind, (*VIEWS, Copy)) and lasting.intersection(operator.outputs):
            lasting.update(operator.inputs)
    return frozenset(lasting)


def is_random(kind: Kind) -> bool:
    """Return whether two runs may give different results."""
    return isinstance(kind, Aten) and torch.Tag.nondeterministic_seeded in aten_function(kind.target).tags
