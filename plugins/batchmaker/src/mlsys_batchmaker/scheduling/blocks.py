"""Contiguous numbers for requests: a block of node numbers, of rows of a bank. Pure bookkeeping.

Blocks are powers of two, freed ones are kept by size and reused, so nothing fragments; at most half of a block is idle.
"""

from __future__ import annotations

from mlsys_core.errors import InvalidInputError


class Blocks:
    """Hands out blocks of numbers.

    Args:
        first: the smallest number handed out.
        capacity: numbers from ``first`` up to here; None for no bound.

    Example:
        >>> blocks = Blocks(first=1, capacity=9)
        >>> blocks.take(3), blocks.take(4), blocks.take(1)
        (1, 5, None)
        >>> blocks.give_back(1, 3)
        >>> blocks.take(4)
        1
    """

    def __init__(self, *, first: int = 0, capacity: int | None = None) -> None:
        if capacity is not None and capacity <= first:
            raise InvalidInputError(f"no numbers from {first} to {capacity}: the capacity must be above the first")
        self._first = first
        self._capacity = capacity
        self._top = first
        self._free: dict[int, list[int]] = {}
        self.num_used = 0  # numbers in blocks handed out

    @property
    def top(self) -> int:
        """One above the largest number ever handed out."""
        return self._top

    def fits(self, count: int) -> bool:
        """Whether ``count`` numbers could be had if all blocks were free."""
        return self._capacity is None or _block(count) <= self._capacity - self._first

    def take(self, count: int) -> int | None:
        """The first of ``count`` numbers in a row; None if there is no room now. A count of 0 takes nothing."""
        if count == 0:
            return self._first
        size = 1 << (count - 1).bit_length()  # as _block(): this is called ten times a request
        free = self._free.get(size)
        if free:
            start = free.pop()
        elif self._capacity is None or self._top + size <= self._capacity:
            start = self._top
            self._top += size
        else:
            start_or_none = self._split(size)
            if start_or_none is None:
                return None
            start = start_or_none
        self.num_used += size
        return start

    def give_back(self, start: int, count: int) -> None:
        """Return a block that :meth:`take` gave for ``count``."""
        if count == 0:
            return
        size = 1 << (count - 1).bit_length()
        self._free.setdefault(size, []).append(start)
        self.num_used -= size
        if self.num_used == 0:  # nobody holds anything: begin anew, so that no pattern of sizes can wedge it
            self._free.clear()
            self._top = self._first

    def _split(self, size: int) -> int | None:
        """A block of ``size`` cut from the smallest larger free one."""
        larger = min((other for other, free in self._free.items() if other > size and free), default=None)
        if larger is None:
            return None
        start = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, []).append(start + larger)
        return start


def _block(count: int) -> int:
    return 1 << (count - 1).bit_length()
