"""Departure of a connection's client, told to callbacks: a task that waits for each client costs more than its request.

ASGI tells it only to who awaits ``receive``. This package's own server (:class:`.protocol.Connection`) also leaves a
:class:`Departure` in the scope of each request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SCOPE_KEY = "mlsys.departure"


class Departure:
    """The end of one connection, and the callbacks that hear of it; in the event loop's thread.

    Args:
        resume_reading: has the server read from the connection, without which it sees no end.

    Example:
        >>> departure = Departure(lambda: None)
        >>> departure.watch(lambda: print("gone"))
        >>> departure.note()
        gone
    """

    __slots__ = ("_callbacks", "_resume_reading", "has_left")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        self._resume_reading = resume_reading
        self._callbacks: list[Callable[[], None]] = []  # those of the requests that run: seldom more than one
        self.has_left = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the client leaves; now, if it has left already."""
        if self.has_left:
            callback()
            return
        self._resume_reading()
        self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` no more; one that is unknown is ignored."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def note(self) -> None:
        """Call all callbacks, each once: the client has left."""
        self.has_left = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def attach_departure(scope: Any, departure: Departure) -> None:
    """Leave ``departure`` in the scope of a request."""
    scope[_SCOPE_KEY] = departure


def departure_of(scope: Any) -> Departure | None:
    """Return the departure of the request's client; None: the server tells it to who receives only."""
    departure: Departure | None = scope.get(_SCOPE_KEY)
    return departure
