"""Limit on restarts: a few at once, then fewer and fewer, then none."""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """Decision whether a process that died is started again, and when. Pure: the caller has the clock.

    Args:
        max_deaths: Deaths within ``window_s`` from which on nothing is started any more.
        window_s: Seconds.
        num_immediate: Deaths within ``window_s`` that are followed by a start at once; each further one waits twice
            as long as the one before, from ``backoff_s`` on.
        backoff_s: Seconds.

    Example:
        >>> budget = RestartBudget(max_deaths=4, window_s=10.0, num_immediate=2, backoff_s=0.5)
        >>> [budget.delay_s(now) for now in (0.0, 0.1, 0.2, 0.3)]
        [0.0, 0.0, 0.5, None]
        >>> budget.delay_s(60.0)
        0.0
    """

    def __init__(
        self, *, max_deaths: int = 16, window_s: float = 10.0, num_immediate: int = 8, backoff_s: float = 0.1
    ) -> None:
        self.max_deaths, self.window_s = max_deaths, window_s
        self._num_immediate, self._backoff_s = num_immediate, backoff_s
        self._deaths: deque[float] = deque()

    def delay_s(self, now: float) -> float | None:
        """Note a death at ``now`` (seconds); return how long to wait for the next start, or None: give up."""
        self._deaths.append(now)
        while self._deaths[0] <= now - self.window_s:
            self._deaths.popleft()
        number = len(self._deaths)
        if number >= self.max_deaths:
            return None
        if number <= self._num_immediate:
            return 0.0
        return self._backoff_s * 2.0 ** (number - self._num_immediate - 1)
