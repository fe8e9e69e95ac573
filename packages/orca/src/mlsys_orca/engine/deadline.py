"""Deadline of an iteration, from those before it. Pure."""

from __future__ import annotations

_LEAST_S = 1.0
_FACTOR = 8.0  # beyond the slowest so far: other work on the machine, longer contexts
_UNKNOWN_S = 60.0  # the first iterations touch memory for the first time
_NUM_UNKNOWN = 3


class IterationDeadline:
    """Seconds that an iteration may take: several times the slowest so far, in proportion to its tokens.

    Args:
        slowest_s: As another worker found it; 0: unknown.
        most_tokens: Likewise.

    Example:
        >>> deadline = IterationDeadline(0.5, most_tokens=100)
        >>> deadline.limit_s(10), deadline.limit_s(200)
        (4.0, 8.0)
    """

    def __init__(self, slowest_s: float = 0.0, *, most_tokens: int = 0) -> None:
        self.slowest_s, self.most_tokens = slowest_s, most_tokens
        self._num_unknown = 0 if slowest_s else _NUM_UNKNOWN

    def limit_s(self, num_tokens: int) -> float:
        """Return the seconds that an iteration over ``num_tokens`` tokens may take."""
        if self._num_unknown:
            return _UNKNOWN_S
        return max(_LEAST_S, _FACTOR * self.slowest_s * max(1.0, num_tokens / self.most_tokens))

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note an iteration that has ended."""
        self._num_unknown = max(0, self._num_unknown - 1)
        self.slowest_s, self.most_tokens = max(self.slowest_s, seconds), max(self.most_tokens, num_tokens)
