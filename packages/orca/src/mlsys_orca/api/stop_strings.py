"""Cut a streamed answer at the first stop string to be complete, also where one spans several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Filter that passes text on as soon as it can no longer be part of a stop string.

    Example:
        >>> stop = StopStringFilter(["END"])
        >>> [stop.push(piece) for piece in ("one E", "N", "x EN", "D two")]
        ['one ', '', 'ENx ', '']
        >>> stop.stopped_by
        'END'
    """

    def __init__(self, stop_strings: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._keeps_stop = keeps_stop  # the stop string itself is passed on too
        self._held = ""  # text that may turn out to begin a stop string
        self.stopped_by: str | None = None

    @property
    def is_stopped(self) -> bool:
        """True if a stop string was complete."""
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown of it and of what was held back."""
        if self.stopped_by is not None:
            return ""
        self._held += text
        # The first stop string to be complete counts, so that the borders between pieces make no difference.
        found = [
            (start + len(stop), start, stop) for stop in self._stop_strings if (start := self._held.find(stop)) >= 0
        ]
        if found:
            stop_at, start, self.stopped_by = min(found)
            shown, self._held = self._held[: stop_at if self._keeps_stop else start], ""
            return shown
        num_held = max((self._overlap(stop) for stop in self._stop_strings), default=0)
        split = len(self._held) - num_held
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def pass_on(self, text: str) -> str:
        """Take the next piece as text that cannot be part of a stop string."""
        shown, self._held = self._held + text, ""
        return shown

    def finish(self) -> str:
        """End the answer; return the text that was held back, which was no stop string after all."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest proper beginning of ``stop`` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
