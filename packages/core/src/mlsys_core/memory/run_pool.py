"""Runs of adjacent numbers, such as the rows of a tensor that a request reads and writes as one strip.

The pool deals in numbers only; the tensors belong to whoever runs the model. It has no lock: one thread owns it.
"""

from __future__ import annotations

from mlsys_core.errors import InvalidInputError


class RunPool:
    """Hands out runs of numbers, each a power of two long; freed ones are kept by size and used again.

    So nothing fragments, and at most half of a run is idle.

    Args:
        first: the smallest number handed out.
        capacity: numbers from ``first`` up to here; None for no bound.

    Example:
        >>> runs = RunPool(1, 9)
        >>> runs.take(3), runs.take(4), runs.take(1)
        (1, 5, None)
        >>> runs.give_back(1, 3)
        >>> runs.take(4)
        1
    """

    def __init__(self, first: int = 0, capacity: int | None = None) -> None:
        if capacity is not None and capacity <= first:
            raise InvalidInputError(f"no numbers from {first} to {capacity}: the capacity must be above the first")
        self._first = first
        self._capacity = capacity
        self._top = first
        self._free: dict[int, list[int]] = {}
        self.num_used = 0  # numbers in runs handed out

    @property
    def top(self) -> int:
        """One above the largest number ever handed out."""
        return self._top

    def fits(self, count: int) -> bool:
        """Return whether ``count`` adjacent numbers would be available if all were free."""
        return self._capacity is None or _rounded(count) <= self._capacity - self._first

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` numbers in a row; None if there is no room now. A count of 0 takes nothing."""
        if count == 0:
            return self._first
        size = _rounded(count)
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
        """Return a run that :meth:`take` gave for ``count``."""
        if count == 0:
            return
        size = _rounded(count)
        self._free.setdefault(size, []).append(start)
        self.num_used -= size
        if self.num_used == 0:  # nobody holds anything: begin anew, so that no pattern of sizes can wedge it
            self._free.clear()
            self._top = self._first

    def _split(self, size: int) -> int | None:
        """Return a run of ``size`` cut from the smallest larger free one."""
        larger = min((other for other, free in self._free.items() if other > size and free), default=None)
        if larger is None:
            return None
        start = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, []).append(start + larger)
        return start


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()
