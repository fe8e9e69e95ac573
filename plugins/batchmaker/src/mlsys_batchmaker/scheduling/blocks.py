"""Contiguous numbers for requests: a block of node numbers, of rows of a bank. Pure bookkeeping.

Blocks are powers of two, freed ones are kept by size and reused, so nothing fragments; at most half of a block is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        size = _block(count)
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
        size = _block(count)
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


class Room:
    """Several kinds of numbers at once, a block of each for a request.

    What a request gives back is kept as a whole for the next one of the same sizes, which most are; only when something
    is lacking are the kept ones taken apart.

    Args:
        kinds: the numbers of each kind.

    Example:
        >>> room = Room([Blocks(first=1, capacity=9), Blocks()])
        >>> room.take((4, 2)), room.take((4, 2)), room.take((1, 1))
        ((1, 0), (5, 2), None)
        >>> room.give_back((4, 2), (1, 0))
        >>> room.take((2, 2))
        (1, 0)
    """

    def __init__(self, kinds: Sequence[Blocks]) -> None:
        self.kinds = list(kinds)
        self.num_held = 0  # blocks of all kinds that somebody holds count as one
        self._kept: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def take(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The first number of a block of each kind; None if there is no room now."""
        kept = self._kept.get(sizes)
        starts = kept.pop() if kept else self._take(sizes)
        if starts is None and self._kept:
            self._take_apart()
            starts = self._take(sizes)
        self.num_held += starts is not None
        return starts

    def give_back(self, sizes: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Return what :meth:`take` gave for ``sizes``."""
        self._kept.setdefault(sizes, []).append(starts)
        self.num_held -= 1

    def _take(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        starts: list[int] = []
        for blocks, size in zip(self.kinds, sizes, strict=True):
            start = blocks.take(size)
            if start is None:
                for given, had, taken in zip(self.kinds, sizes, starts, strict=False):
                    given.give_back(taken, had)
                return None
            starts.append(start)
        return tuple(starts)

    def _take_apart(self) -> None:
        kept, self._kept = self._kept, {}
        for sizes, free in kept.items():
            for starts in free:
                for blocks, start, size in zip(self.kinds, starts, sizes, strict=True):
                    blocks.give_back(start, size)


def _block(count: int) -> int:
    return 1 << (count - 1).bit_length()
