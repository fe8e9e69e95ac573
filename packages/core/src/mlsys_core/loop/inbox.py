"""Entry of the loop: requests and cancellations from other threads, and the ids of unfinished requests.

The only state of the loop that threads share. It has no lock: a signal handler may interrupt any of its lines, call
the loop, and wait for another thread that comes here too. Each access is one call of a ``dict`` or a ``deque``, which
no other thread sees halfway. The loop takes messages out at the start of each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
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
        self._refuses = self._has_stopped = False  # each is set once, for good
        self.was_aborted = False  # requests left by close()
        self._error: BaseException | None = None
        self._unfinished: dict[str, tuple[str, Request]] = {}  # submission by id, in order
        self._messages: deque[tuple[str, Request | Cancel | Call]] = deque()

    def __len__(self) -> int:
        """Return the number of messages not yet taken."""
        return len(self._messages)

    @property
    def state(self) -> LoopState:
        """Treatment of new requests."""
        if self._has_stopped:
            return LoopState.STOPPED
        return LoopState.DRAINING if self._refuses else LoopState.OPEN

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
        if not self._refuses:
            submission = (request_id, request)
            if self._unfinished.setdefault(request_id, submission) is not submission:
                raise InvalidInputError(
                    f"request id {request_id!r} is in use: it can be used again once it has finished"
                )
            # Who refuses or closes after this look finds the request. If it was before, the request is taken back
            # here, unless close() has found it: then it was accepted and has left.
            if not self._refuses or self._unfinished.pop(request_id, None) is None:
                self._messages.append(submission)
                return
        how = "has stopped" if self._has_stopped else "is draining"
        why = f": {self._error}" if self._error is not None else ""
        raise LoopClosedError(f"request {request_id!r} refused: the loop {how}{why}") from self._error

    def cancel(self, request_id: str) -> bool:
        """Leave a cancellation, from any thread; return False, and leave none, if the id is unknown or finished."""
        known = request_id in self._unfinished
        if known:
            self._messages.append((request_id, Cancel.CANCEL))
        return known

    def refuse(self) -> None:
        """Accept no further requests."""
        self._refuses = True

    def call(self, function: Callable[[], None]) -> None:
        """Leave a function to be called, from any thread; a loop that has stopped calls none."""
        if not self._has_stopped:
            self._messages.append(("", Call(function)))

    def take(self) -> list[tuple[str, Request | Cancel | Call]]:
        """Return all messages, oldest first, and forget them; who comes meanwhile is seen by the next step."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def leave(self, request_id: str) -> None:
        """Record that a request has finished.

        Raises:
            ServingError: it was not unfinished, so the scheduler finished it twice or made up its id.
        """
        if self._unfinished.pop(request_id, None) is None:
            raise ServingError(
                f"the scheduler finished request {request_id!r}, which is not unfinished: each one finishes once"
            )

    def close(self, error: BaseException | None) -> list[str]:
        """Stop for good: accept nothing, forget all messages.

        Returns the ids that were unfinished, in order, each once over all calls.
        """
        if not self._has_stopped:
            self._error, self._has_stopped, self._refuses = error, True, True
        request_ids: list[str] = []
        with suppress(KeyError):  # another took the last one
            while self._unfinished:
                self.was_aborted = True  # before it is gone: nobody must take it for served
                request_ids.append(self._unfinished.popitem()[0])
        self._messages.clear()
        return request_ids[::-1]
