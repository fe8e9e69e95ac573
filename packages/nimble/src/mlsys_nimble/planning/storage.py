"""The memory plan: an offset in one arena for every value that owns memory.

Follows :mod:`mlsys_nimble.planning.layout`. Two values may share bytes only if the last use of one precedes the first
of the other, in every order that the dependencies allow or, given a schedule, in every order of its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlsys_core.memory import MemoryPlan, plan_offsets_for_conflicts

from mlsys_nimble.ir.program import ValueId
from mlsys_nimble.planning.layout import Layout
from mlsys_nimble.planning.streams import Bits

ALIGNMENT = 64  # bytes; a cache line


@dataclass(frozen=True, slots=True)
class Storage:
    """Offsets of the values' roots in the arena."""

    plan: MemoryPlan
    offsets: dict[ValueId, int]  # bytes, by root; without constants and the caller's tensors
    conflicts: tuple[Bits, ...] = ()  # by root, in the order of `offsets`: roots that may not share its memory


def dependencies(layout: Layout) -> list[tuple[int, ...]]:
    """Return for each operator those whose results it reads, ascending, through operators that run in place."""
    program = layout.program
    made_by: dict[ValueId, frozenset[int]] = {}
    found: list[tuple[int, ...]] = []
    for index, operator in enumerate(program.operators):
        needed = frozenset[int]().union(*(made_by.get(value, frozenset()) for value in operator.inputs))
        makers = needed if index in layout.in_place else frozenset({index})
        made_by.update(dict.fromkeys(operator.outputs, makers))
        found.append(() if index in layout.in_place else tuple(sorted(needed)))
    return found


def ancestors(dependencies: Sequence[Sequence[int]]) -> list[Bits]:
    """Return for each operator all that must have run before it, as a bitset."""
    before: list[Bits] = []
    for needed in dependencies:
        bits = 0
        for operator in needed:
            bits |= before[operator] | 1 << operator
        before.append(bits)
    return before


def plan_storage(layout: Layout, before: Sequence[Bits]) -> Storage:
    """Assign every root an offset in one arena.

    Args:
        layout: Places of values within their roots.
        before: For each operator those that have surely run before it, such as its :func:`ancestors`.
    """
    program = layout.program
    outside = {*program.inputs, *program.outputs, *program.constants}
    uses: dict[ValueId, Bits] = {}  # operators that write or read a root
    ready: dict[ValueId, Bits] = {}  # operators that have surely run before the first of them writes it
    sizes: dict[ValueId, int] = {}
    for index, operator in enumerate(program.operators):
        if index in layout.in_place:
            continue
        for value in (*operator.inputs, *operator.outputs):
            root = layout.places[value].root
            uses[root] = uses.get(root, 0) | 1 << index
        for value in operator.outputs:
            root = layout.places[value].root
            ready[root] = ready[root] & before[index] if root in ready else before[index]
            sizes[root] = program.values[root].nbytes
    roots = [root for root in ready if root not in outside]
    kept = {layout.places[value].root for value in program.kept()}
    conflicts: list[Bits] = []
    for root in roots:
        bits = 0
        for number, other in enumerate(roots):
            if root == other:
                continue
            first = root not in kept and not uses[root] & ~ready[other]
            last = other not in kept and not uses[other] & ~ready[root]
            bits |= (not (first or last)) << number
        conflicts.append(bits)
    plan = plan_offsets_for_conflicts([sizes[root] for root in roots], conflicts, alignment=ALIGNMENT)
    return Storage(plan, dict(zip(roots, plan.offsets, strict=True)), tuple(conflicts))


@dataclass(frozen=True, slots=True)
class Stack:
    """Order of the values by offset in one arena: those below each."""

    order: tuple[int, ...]  # all values, each after those below it
    below: tuple[tuple[int, ...], ...]  # by value: those directly below it
    alignment: int  # bytes

    def offsets(self, nbytes: Sequence[int]) -> tuple[list[int], int]:
        """Return each value's offset, and the arena's size, in bytes, where the values have these sizes.

        Example:
            >>> stack_of([0, 64, 0], [64, 64, 128], [0b010, 0b101, 0b010], 64).offsets([100, 10, 20])
            ([0, 128, 0], 192)
        """
        ends, found, peak = [0] * len(self.order), [0] * len(self.order), 0
        for value in self.order:
            offset = 0
            for other in self.below[value]:
                offset = max(offset, ends[other])
            found[value] = offset
            ends[value] = end = offset + -(-nbytes[value] // self.alignment) * self.alignment
            peak = max(peak, end)
        return found, peak


def stack_of(offsets: Sequence[int], nbytes: Sequence[int], conflicts: Sequence[int], alignment: int) -> Stack:
    """Return the order of a plan.

    Args:
        offsets: Offset of each value in the plan, bytes.
        nbytes: Size of each value in the plan.
        conflicts: Bitset for each value of those that it may not share memory with.
        alignment: Of every offset, bytes.
    """
    order = sorted(range(len(offsets)), key=lambda value: (offsets[value], offsets[value] + nbytes[value], value))
    reached = [0] * len(offsets)  # all below a value, through any number of others
    below: list[tuple[int, ...]] = [()] * len(offsets)
    for position, value in enumerate(order):
        found: list[int] = []
        for other in reversed(order[:position]):  # the closest first, which may reach the others
            if conflicts[value] >> other & 1 and not reached[value] >> other & 1:
                found.append(other)
                reached[value] |= reached[other] | 1 << other
        below[value] = tuple(found)
    return Stack(tuple(order), tuple(below), alignment)
