"""A memory plan for sizes that vary: offsets as functions of the sizes.

A plan at the hint says which of two values that may not share memory lies below the other. Kept, that order gives a
plan at any sizes: each value begins where the highest of those below it ends. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stack:
    """Which values lie below which, in one arena."""

    order: tuple[int, ...]  # all values, each after those below it
    below: tuple[tuple[int, ...], ...]  # by value: those on which it may lie directly
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
