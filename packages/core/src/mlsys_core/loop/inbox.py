"""Entry of the loop: requests and cancellations from other threads, and the ids of unfinished requests.

The only state of the loop that threads share; one lock guards it. The loop takes messages out at the start of each
step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.protocols import Request


class LoopClosedError(ServingError):
    """The loop is draining or has stopped, and takes no requests."""

    http_status = 503  # as the HTTP base answers it


class LoopState(Enum):
    """Treatment of new requests by a loop."""

    OPEN = "open"  # takes them
    DRAINING = "draining"  # refuses them, finishes those it has
    STOPPED = "stopped"  # refuses them, has none


class Cancel(Enum):
    """Marker in a message, in place of a request."""

    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Call:
    """Message that has the loop call a function."""

    function: Callable[[], None]


class Inbox(Generic[Request]):
    """Messages in order of arrival, and the ids of the requests accepted that have not left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = LoopState.OPEN
        self._error: BaseException | None = None
        self._unfinished: dict[str, None] = {}  # in order of submission
        self._messages: list[tuple[str, Request | Cancel | Call]] = []

    def __len__(self) -> int:
        """Return the number of messages not yet taken."""
        return len(self._messages)

    @property
    def state(self) -> LoopState:
        """Treatment of new requests."""
        return self._state

    @property
    def error(self) -> BaseException | None:
        """Error that the inbox was closed with, if any."""
        return self._error

    @property
    def num_unfinished(self) -> int:
        """Number of requests accepted that have not left."""
        return len(self._unfinished)

    def submit(self, request: Request, request_id: str) -> None:
        """Accept ``request``; from any thread.

        Raises:
            LoopClosedError: the loop is not open.
            InvalidInputError: ``request_id`` is in use, or is not the request's own.
        """
        own_id = getattr(request, "request_id", request_id)
        if own_id != request_id:
            raise InvalidInputError(f"request {own_id!r} was submitted as {request_id!r}: the two ids must be equal")
        with self._lock:
            if self._state is not LoopState.OPEN:
                how = "is draining" if self._state is LoopState.DRAINING else "has stopped"
                why = f": {self._error}" if self._error is not None else ""
                raise LoopClosedError(f"request {request_id!r} refused: the loop {how}{why}") from self._error
            if request_id in self._unfinished:
                raise InvalidInputError(
                    f"request id {request_id!r} is in use: it can be used again once it has finished"
                )
            self._unfinished[request_id] = None
            self._messages.append((request_id, request))

    def cancel(self, request_id: str) -> bool:
        """Leave a cancellation, from any thread; return False, and leave none, if the id is unknown or finished."""
        with self._lock:
            known = request_id in self._unfinished
            if known:
                self._messages.append((request_id, Cancel.CANCEL))
            return known

    def refuse(self) -> None:
        """Accept no further requests."""
        with self._lock:
            if self._state is LoopState.OPEN:
                self._state = LoopState.DRAINING

    def call(self, function: Callable[[], None]) -> None:
        """Leave a function to be called, from any thread; a loop that has stopped calls none."""
        with self._lock:
            if self._state is not LoopState.STOPPED:
                self._messages.append(("", Call(function)))

    def take(self) -> list[tuple[str, Request | Cancel | Call]]:
        """Return all messages, oldest first, and forget them."""
        if not self._messages:  # the usual case, without the lock: who comes now is seen by the next step
            return []
        with self._lock:
            messages, self._messages = self._messages, []
        return messages

    def leave(self, request_id: str) -> None:
        """Record that a request has finished.

        Raises:
            ServingError: it was not unfinished, so the scheduler finished it twice or made up its id.
        """
        with self._lock:
            if request_id not in self._unfinished:
                raise ServingError(
                    f"the scheduler finished request {request_id!r}, which is not unfinished: each one finishes once"
                )
            del self._unfinished[request_id]

    def close(self, error: BaseException | None) -> list[str]:
        """Stop for good: accept nothing, forget all messages.

        Returns the ids that were unfinished, each once over all calls.
        """
        with self._lock:
            if self._state is not LoopState.STOPPED:
                self._state, self._error = LoopState.STOPPED, error
            request_ids = list(self._unfinished)
            self._unfinished.clear()
            self._messages.clear()
        return request_ids
