"""Room for a request: a run of numbers of each kind, of rows of each bank and of nodes. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_core.memory import Runs


class Room:
    """Several kinds of numbers at once, a run of each for a request.

    What a request gives back is kept as a whole for the next one of the same sizes, which most are; only when something
    is lacking are the kept ones taken apart.

    Args:
        kinds: the numbers of each kind.

    Example:
        >>> from mlsys_core.memory import RunPool
        >>> room = Room([RunPool(1, 9), RunPool()])
        >>> room.take((4, 2)), room.take((4, 2)), room.take((1, 1))
        ((1, 0), (5, 2), None)
        >>> room.give_back((4, 2), (1, 0))
        >>> room.take((2, 2))
        (1, 0)
    """

    def __init__(self, kinds: Sequence[Runs]) -> None:
        self.kinds = list(kinds)
        self.num_held = 0  # runs of all kinds that somebody holds count as one
        self._kept: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def take(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first number of a run of each kind; None if there is no room now."""
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
        for runs, size in zip(self.kinds, sizes, strict=True):
            start = runs.take(size)
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
                for runs, start, size in zip(self.kinds, starts, sizes, strict=True):
                    runs.give_back(start, size)
