"""Cutting a streamed answer at the first stop string to be complete, also where one spans several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text on as soon as it can no longer be part of a stop string.

    Example:
        >>> stop = StopStringFilter(["END"])
        >>> [stop.push(piece) for piece in ("one E", "N", "x EN", "D two")]
        ['one ', '', 'ENx ', '']
        >>> stop.is_stopped
        True
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""  # text that may turn out to begin a stop string
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown of it and of what was held back."""
        if self.is_stopped:
            return ""
        self._held += text
        # The first stop string to be complete counts, so that the borders between pieces make no difference.
        found = [(start + len(stop), start) for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        num_held = max((self._overlap(stop) for stop in self._stop_strings), default=0)
        split = len(self._held) - num_held
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """The answer ended: what was held back was no stop string after all."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper beginning of ``stop`` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
