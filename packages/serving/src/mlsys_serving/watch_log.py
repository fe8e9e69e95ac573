"""Log of an engine's events, for whoever looks at them; see :mod:`mlsys_serving.watch`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_KEPT = 512  # events of an engine: requests that came or left, and batches


class Event(NamedTuple):
    """One event, to be told later: ``call(*args)``."""

    at_s: float  # when it happened, on the engine's clock; of a batch, when it ended
    call: Callable[..., None]
    args: tuple[Any, ...]


class EventLog:
    """Events of one engine, in their order. From any thread.

    Args:
        num_kept: Size of the ring.

    Example:
        >>> log, told = EventLog(num_kept=2), []
        >>> for number in range(3):
        ...     log.note(float(number), told.append, number)
        >>> log.has_lost, told
        (True, [])
        >>> for event in log.begin(threading.RLock()):
        ...     event.call(*event.args)
        >>> log.note(3.0, told.append, 3)
        >>> told
        [1, 2, 3]
    """

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[Event] = deque(maxlen=num_kept)
        self._board_lock: threading.RLock | None = None  # of who looks on; None: nobody does

    @property
    def is_live(self) -> bool:
        """True while events go to a board."""
        return self._board_lock is not None

    @property
    def has_lost(self) -> bool:
        """True if the ring is full, so that earlier events may be gone."""
        return len(self._kept) == self._kept.maxlen

    def note(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` now, under the board's lock, or when somebody looks on."""
        lock = self._board_lock
        if lock is None:
            self._kept.append(Event(at_s, call, args))
            return
        with lock:
            for event in self._take():  # a thread that had seen nobody look appended it after the board had asked
                event.call(*event.args)
            call(*args)

    def begin(self, board_lock: threading.RLock) -> list[Event]:
        """Go live; return the cached events, to be told under ``board_lock``, which the caller holds."""
        self._board_lock = board_lock
        return self._take()

    def end(self) -> None:
        """Keep events from now on."""
        self._board_lock = None

    def _take(self) -> list[Event]:
        events = []
        while self._kept:
            events.append(self._kept.popleft())
        return events
