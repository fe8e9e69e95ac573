"""Programs of varying sizes: what depends on sizes alone, and the program at given sizes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.ir.sizes import NotGeneral, Size

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """A program without what its sizes alone decide (masks, positions), which becomes inputs at its end."""

    main: Program
    tables: Program  # no inputs; its outputs are those inputs


def has_sizes(tree: Any) -> bool:
    """Return whether nested data holds a size."""
    if isinstance(tree, tuple | list):
        return any(map(has_sizes, tree))
    if dataclasses.is_dataclass(tree):
        return any(has_sizes(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return isinstance(tree, Size)


def at_sizes(tree: Any, value: Callable[[Size], int]) -> Any:
    """Return nested data in which ``value`` replaces every size."""
    if isinstance(tree, Size):
        return value(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(at_sizes(part, value) for part in tree) if has_sizes(tree) else tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and has_sizes(tree):
        made = {f.name: at_sizes(getattr(tree, f.name), value) for f in dataclasses.fields(tree)}
        return type(tree)(**made)
    return tree


def split(program: Program, is_random: Callable[[Any], bool]) -> Split:
    """Separate what depends on sizes and constants alone.

    Raises:
        NotGeneral: a result of the program does.
    """
    fixed = set(program.constants) - {old for old, _ in program.mutations}
    touched: set[ValueId] = set()
    tables: list[Operator] = []
    main: list[Operator] = []
    for operator in program.operators:
        if not fixed.issuperset(operator.inputs) or is_random(operator.kind):
            main.append(operator)
            continue
        fixed.update(operator.outputs)
        types = [program.values[value] for value in operator.outputs]
        if has_sizes(operator.kind) or has_sizes(types) or not touched.isdisjoint(operator.inputs):
            touched.update(operator.outputs)
            tables.append(operator)
        else:
            main.append(operator)
            tables.append(operator)  # both may read it
    wanted = {value for operator in main for value in operator.inputs if value in touched}
    if not touched.isdisjoint(program.kept()):
        raise NotGeneral("a result depends on sizes alone")
    given = tuple(sorted(wanted))
    made = _needed(replace(program, operators=tuple(tables), inputs=(), outputs=given, mutations=()))
    return Split(replace(program, operators=tuple(main), inputs=(*program.inputs, *given)), made)


def _needed(program: Program) -> Program:
    """Return the program without operators that its outputs do not need."""
    needed, kept = set(program.outputs), list[Operator]()
    for operator in reversed(program.operators):
        if not needed.isdisjoint(operator.outputs):
            needed.update(operator.inputs)
            kept.append(operator)
    constants = {value: tensor for value, tensor in program.constants.items() if value in needed}
    return replace(program, operators=tuple(reversed(kept)), constants=constants)


class AtSizes(Sequence[T]):
    """Items of a sequence at given sizes, each computed when asked for."""

    def __init__(self, items: Sequence[T], value: Callable[[Size], int]) -> None:
        self._items, self._value = items, value
        self._found: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._found:
            self._found[index] = at_sizes(self._items[index], self._value)
        return self._found[index]
