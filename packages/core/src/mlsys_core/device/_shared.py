"""Parts common to the streams of every device: the first error, and closing at the end of a ``with`` block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Protocol

from mlsys_core.errors import InvalidInputError


class ErrorLatch:
    """Holds the first error until it is raised; while it holds one, the stream skips work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def is_set(self) -> bool:
        """True if an error waits to be raised."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Hold ``error``, unless an earlier one is held."""
        with self._lock:
            if self._error is None:
                self._error = error

    def raise_kept(self) -> None:
        """Raise the held error, if any, and clear it."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame and the traceback keep each other, and the failed work's tensors, alive


class Closable(Protocol):
    """An object that :func:`close_after` closes."""

    def close(self) -> None: ...


class Numbered(Protocol):
    """A stream as seen by its device."""

    number: int
    errors: ErrorLatch


def close_after(stream: Closable, error: BaseException | None) -> None:
    """Close ``stream`` at the end of a ``with`` block that ``error`` left; that error is never masked."""
    try:
        stream.close()
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"besides, work on {stream!r} failed: {late!r}")


def raise_oldest(streams: Iterable[Numbered]) -> None:
    """Raise the kept error of the earliest-made stream that has one."""
    for stream in sorted(streams, key=lambda stream: stream.number):
        stream.errors.raise_kept()


def check_timeout(timeout_s: float | None) -> float | None:
    """Return ``timeout_s`` capped at the platform's maximum, None if there is no bound.

    Raises:
        InvalidInputError: it is negative or not a number.
    """
    if timeout_s is None:
        return None
    if math.isnan(timeout_s) or timeout_s < 0:
        raise InvalidInputError(f"timeout_s is {timeout_s}: give seconds >= 0, or None to wait without bound")
    return min(timeout_s, threading.TIMEOUT_MAX)
