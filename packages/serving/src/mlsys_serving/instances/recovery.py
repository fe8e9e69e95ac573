"""Requests of one instance: which run now, and which run again when its worker has died. Pure.

A worker that was killed from outside makes nobody a suspect: a request runs in one piece, and cannot show that it
advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from mlsys_serving.processes.recovery import Record, Turns, judge


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
        self.running: dict[int, Record] = {}  # sent to the worker, in order
        self._suspects: dict[int, Record] = {}  # those of the turns that are left
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running.keys() | self._suspects.keys())

    @property
    def has_suspects(self) -> bool:
        """True while requests run one by one."""
        return not self._turns.is_open

    def add(self, number: int) -> None:
        """Accept a request."""
        self.waiting.append(number)

    def next(self) -> list[int]:
        """Return the requests to be sent now; they are under way from here on."""
        if (alone := self._turns.alone) is not None:
            if self.running:
                return []
            self.running[alone] = self._suspects[alone]
            return [alone]
        sent = list(self.waiting)
        self.waiting.clear()
        self.running.update((number, Record()) for number in sent)
        return sent

    def remove(self, number: int) -> None:
        """Forget a request, wherever it is; unknown ones are ignored."""
        self.running.pop(number, None)
        self._suspects.pop(number, None)
        self._turns.drop(number)
        if number in self.waiting:
            self.waiting.remove(number)

    def died(self, *, is_crash: bool) -> Sequence[int]:
        """Note that the worker has died; return the requests that have caused it, which are forgotten.

        Args:
            is_crash: It ended by its own doing; False: someone killed it.
        """
        running, self.running = self.running, {}
        verdict = judge(running.values(), is_crash=is_crash, still_deaths=None)
        failed = [number for number, record in running.items() if record in verdict.failed]
        for number in failed:
            self.remove(number)
        suspects = {number: record for number, record in running.items() if record in verdict.suspects}
        self._suspects |= suspects
        self._turns.put_first(suspects)
        again = [number for number in running if number not in self._suspects and number not in failed]
        self.waiting.extendleft(reversed(again))
        return failed


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
