"""Waiting between threads: a mark that is passed once, and a short spin before each blocking wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

# time.sleep(0) is no substitute on Linux: it sleeps for the timer's slack, some 50 microseconds.
_yield_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def spin_until(condition: Callable[[], bool], spin_s: float) -> bool:
    """Try ``condition`` for at most ``spin_s`` seconds; return whether it became true."""
    if condition():
        return True
    end = time.perf_counter() + spin_s
    while time.perf_counter() < end:
        _yield_processor()
        if condition():
            return True
    return False


class Mark:
    """One recording of an event: closed until the stream's worker passes it, then open for good."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.passed_at: float | None = None  # seconds on ``clock``; stays None without one
        self._clock = clock
        self._is_passed = False
        self._gate = threading.Lock()  # far cheaper than threading.Event, and many marks are never waited for
        self._gate.acquire()

    def is_passed(self) -> bool:
        return self._is_passed

    def pass_(self) -> None:
        if self._clock is not None:
            self.passed_at = self._clock()
        self._is_passed = True
        self._gate.release()

    def wait(self, spin_s: float, timeout_s: float | None = None) -> bool:
        """Block until passed; returns False if ``timeout_s`` seconds passed first."""
        if spin_until(self.is_passed, spin_s if timeout_s is None else min(spin_s, timeout_s)):
            return True
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return self._is_passed
        self._gate.release()  # let the next one through
        return True
