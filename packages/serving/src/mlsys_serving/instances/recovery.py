"""Decide which requests of an instance run now, and which run again when its worker has died. Pure.

After a crash each request that was under way is a suspect: suspects run alone, one after the other, before all others.
Who is alone in a crash has caused it. A worker that was killed from outside makes nobody a suspect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise


class Ledger:
    """Requests of one instance, by numbers.

    Example:
        >>> ledger = Ledger()
        >>> ledger.add(1); ledger.add(2)
        >>> ledger.next()
        [1, 2]
        >>> ledger.died(is_crash=True), ledger.next()
        ([], [1])
        >>> ledger.died(is_crash=True), ledger.next()  # 1 was alone
        ([1], [2])
    """

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.running: dict[int, None] = {}  # sent to the worker, in order
        self._suspects: deque[int] = deque()
        self._alone: int | None = None  # the suspect that runs

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self._suspects)

    @property
    def has_suspects(self) -> bool:
        """True while requests run one by one."""
        return self._alone is not None or bool(self._suspects)

    def add(self, number: int) -> None:
        """Accept a request."""
        self.waiting.append(number)

    def next(self) -> list[int]:
        """Return the requests to be sent now; they are under way from here on."""
        if self._alone is not None or (self._suspects and self.running):
            return []
        if self._suspects:
            self._alone = self._suspects.popleft()
            sent = [self._alone]
        else:
            sent = list(self.waiting)
            self.waiting.clear()
        self.running.update(dict.fromkeys(sent))
        return sent

    def remove(self, number: int) -> None:
        """Forget a request, wherever it is; unknown ones are ignored."""
        self.running.pop(number, None)
        for queue in (self.waiting, self._suspects):
            if number in queue:
                queue.remove(number)
        if self._alone == number:
            self._alone = None

    def died(self, *, is_crash: bool) -> Sequence[int]:
        """Note that the worker has died; return the requests that have caused it, which are forgotten.

        Args:
            is_crash: It ended by its own doing; False: someone killed it.
        """
        running, alone = list(self.running), self._alone
        self.running.clear()
        self._alone = None
        if alone is not None:
            if is_crash:
                return [alone]
            self._suspects.appendleft(alone)
        elif is_crash:
            self._suspects.extendleft(reversed(running))
        else:
            self.waiting.extendleft(reversed(running))
        return []


def divided(cores: Sequence[int], num_instances: int) -> list[list[int]]:
    """Return the cores of each instance: parts of about the same size, or one core each where there are too few.

    Example:
        >>> divided([0, 1, 2, 3, 4], 2), divided([0, 1], 3)
        ([[0, 1, 2], [3, 4]], [[0], [1], [0]])
    """
    if len(cores) < num_instances:
        return [[cores[number % len(cores)]] for number in range(num_instances)]
    size, rest = divmod(len(cores), num_instances)
    starts = [number * size + min(number, rest) for number in range(num_instances + 1)]
    return [list(cores[start:stop]) for start, stop in pairwise(starts)]
