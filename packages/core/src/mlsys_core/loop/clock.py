"""The two clocks of the serving loop: the machine's, and one that a simulation moves."""

from __future__ import annotations

import time

from mlsys_core.errors import InvalidInputError


class WallClock:
    """Seconds of ``time.perf_counter``: monotonic, and the default clock of the recorder.

    Example:
        >>> clock = WallClock()
        >>> clock.now() <= clock.now()
        True
    """

    __slots__ = ()

    def now(self) -> float:
        """Return the seconds since a fixed but arbitrary moment."""
        return time.perf_counter()


class VirtualClock:
    """A clock that stands still until it is moved; every run of a simulation sees the same times.

    Args:
        start_s: the first time it shows.

    Example:
        >>> clock = VirtualClock()
        >>> clock.advance_to(2.5)
        >>> clock.now()
        2.5
    """

    __slots__ = ("_now_s",)

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time in seconds, as last set."""
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Show ``time_s`` from now on; the current time is allowed and changes nothing.

        Raises:
            InvalidInputError: ``time_s`` lies before the current time, or is not a number.
        """
        if not time_s >= self._now_s:  # also catches NaN
            raise InvalidInputError(f"a clock never runs backwards: it shows {self._now_s} s, asked for {time_s} s")
        self._now_s = time_s
