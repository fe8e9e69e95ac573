"""Deadline of an iteration, from those before it. Pure."""

from __future__ import annotations

_LEAST_S = 5.0  # a starved machine may hold any thread up for seconds
_FACTOR = 8.0  # beyond the slowest so far: other work on the machine, longer contexts
_UNKNOWN_S = 60.0  # the first iterations touch memory for the first time; a token of theirs may take a second, too
_NUM_UNKNOWN = 3


class IterationDeadline:
    """Seconds that an iteration may take: several times the slowest so far, in proportion to its work.

    Args:
        slowest_s: As another worker found it; 0: unknown.
        most_work: Likewise.

    Example:
        >>> deadline = IterationDeadline(0.5, most_work=100)
        >>> deadline.limit_s(10), deadline.limit_s(200)
        (5.0, 8.0)
        >>> IterationDeadline().limit_s(2000.0)
        2000.0
    """

    def __init__(self, slowest_s: float = 0.0, *, most_work: float = 0.0) -> None:
        self.slowest_s, self.most_work = slowest_s, most_work
        self._num_unknown = 0 if slowest_s else _NUM_UNKNOWN

    def limit_s(self, work: float) -> float:
        """Return the seconds that an iteration may take: of ``work``, as :attr:`IterationBatch.work` counts it."""
        if self._num_unknown:
            return max(_UNKNOWN_S, work)
        return max(_LEAST_S, _FACTOR * self.slowest_s * max(1.0, work / self.most_work))

    def note(self, work: float, seconds: float) -> None:
        """Note an iteration that has ended."""
        self._num_unknown = max(0, self._num_unknown - 1)
        self.slowest_s, self.most_work = max(self.slowest_s, seconds), max(self.most_work, work)
