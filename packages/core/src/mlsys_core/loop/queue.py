"""The plain request of request-level serving, and the bounded queue in which such requests wait.

The queue stands between admission and batching: a scheduler pushes what the loop admits and pops what it batches.
Pure: ``now`` is passed in. Iteration-, cell- and stage-level schedulers have richer requests of their own.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from mlsys_core.errors import InvalidInputError, ServingError

Payload = TypeVar("Payload")
PayloadOut = TypeVar("PayloadOut", covariant=True)


@dataclass(frozen=True, slots=True)
class ServeRequest(Generic[PayloadOut]):
    """One request, as its client sent it.

    Raises:
        InvalidInputError: the id is empty, ``length`` is below 1, or a time is not finite.

    Example:
        >>> ServeRequest("a", "I think this", length=3, deadline_s=0.2).priority
        0
    """

    request_id: str  # unique among the unfinished requests of a loop
    payload: PayloadOut  # input of the executor; opaque to the scheduler
    length: int = 1  # size in the model's own units (tokens, rows, steps); what padding is about
    arrival_s: float = 0.0  # when it came, seconds of the loop's clock
    priority: int = 0  # smaller goes first, any sign; equals go in order of admission
    deadline_s: float | None = None  # done later than this it is of no use; seconds of the loop's clock

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidInputError("a request needs a request_id that is not empty")
        if self.length < 1:
            raise InvalidInputError(f"request {self.request_id!r} has length {self.length}: at least 1 is needed")
        if not math.isfinite(self.arrival_s):
            raise InvalidInputError(f"request {self.request_id!r} has arrival_s={self.arrival_s}: it must be finite")
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise InvalidInputError(
                f"request {self.request_id!r} has deadline_s={self.deadline_s}: give a finite time, or None for none"
            )


_NUM_DEPARTURES = 64  # recent departures, for the estimate of the service rate
_RETRY_AFTER_S = 1.0  # before anything was served
_MAX_RETRY_AFTER_S = 60.0  # a stalled server should not send its clients away for good
_MIN_STALE = 64  # heaps with fewer stale entries than this are not rebuilt


class QueueFullError(ServingError):
    """The queue is full. ``retry_after_s`` estimates when its requests will have left (HTTP: 503, Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Entry(NamedTuple, Generic[Payload]):
    sequence: int  # order of admission; tells a stale heap entry from a later request with the same id
    admitted_s: float
    lane: int
    request: ServeRequest[Payload]


class RequestQueue(Generic[Payload]):
    """Waiting requests in lanes under one bound; a lane serves the smallest ``priority`` first, equals in FIFO order.

    ``push``, ``pop`` and ``cancel`` take amortised O(log n), ``expire`` O(log n) for each request that expires. A
    request that leaves out of turn stays in the heaps as a stale entry until it surfaces or stale entries outnumber
    the others.

    Args:
        max_size: most requests waiting at a time, over all lanes; None for no bound.
        lane_of: the lane of a request, for policies that never mix some requests (buckets of lengths); None: all in
            lane 0.

    Raises:
        InvalidInputError: ``max_size`` is below 1.

    Example:
        >>> queue = RequestQueue[None](max_size=2)
        >>> queue.push(ServeRequest("later", None), now=0.0)
        >>> queue.push(ServeRequest("urgent", None, priority=-1), now=0.1)
        >>> queue.pop(now=0.2).request_id
        'urgent'
    """

    def __init__(
        self,
        *,
        max_size: int | None = None,
        lane_of: Callable[[ServeRequest[Payload]], int] | None = None,
    ) -> None:
        if max_size is not None and max_size < 1:
            raise InvalidInputError(f"max_size={max_size}: a queue holds at least 1 request; None means no bound")
        self._max_size = max_size
        self._lane_of = lane_of
        self._entries: OrderedDict[str, _Entry[Payload]] = OrderedDict()  # the truth; in order of admission
        self._orders: dict[int, list[tuple[float, int, str]]] = {}  # lane -> heap of (priority, sequence, id)
        self._lane_sizes: dict[int, int] = {}  # waiting requests of each lane that has any
        self._deadlines: list[tuple[float, int, str]] = []  # heap of (deadline, sequence, id)
        self._expired: list[ServeRequest[Payload]] = []  # left the order, not yet handed over by expire()
        self._departures_s: deque[float] = deque(maxlen=_NUM_DEPARTURES)
        self._next_sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def lanes(self) -> Collection[int]:
        """Lanes in which requests wait."""
        return self._lane_sizes.keys()

    def push(self, request: ServeRequest[Payload], now: float) -> None:
        """Add ``request`` to the queue.

        Raises:
            QueueFullError: ``max_size`` requests wait that have not expired.
            InvalidInputError: a request with this id waits already.
        """
        self._sweep(now)
        request_id = request.request_id
        if request_id in self._entries:
            raise InvalidInputError(
                f"request {request_id!r} waits already: ids must be unique among unfinished requests"
            )
        if self._max_size is not None and len(self._entries) >= self._max_size:
            raise QueueFullError(
                f"request {request_id!r} refused: {len(self._entries)} requests wait, which is the most allowed; "
                f"try again in {self.retry_after_s(now):.3g} s",
                retry_after_s=self.retry_after_s(now),
            )
        lane = 0 if self._lane_of is None else self._lane_of(request)
        sequence = self._next_sequence
        self._next_sequence += 1
        self._entries[request_id] = _Entry(sequence, now, lane, request)
        heapq.heappush(self._orders.setdefault(lane, []), (request.priority, sequence, request_id))
        self._lane_sizes[lane] = self._lane_sizes.get(lane, 0) + 1
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, sequence, request_id))

    def pop(self, now: float, *, lane: int = 0) -> ServeRequest[Payload] | None:
        """Return the next request of ``lane``, or None if none waits there. Never return an expired request."""
        self._sweep(now)
        order = self._orders.get(lane)
        while order:
            _, sequence, request_id = heapq.heappop(order)
            if self._is_current(request_id, sequence):
                self._departures_s.append(now)
                return self._remove(request_id)
        return None

    def waiting(self) -> Iterator[tuple[ServeRequest[Payload], float]]:
        """Yield waiting requests with their time of admission, in order of admission; :meth:`cancel` removes one."""
        return ((entry.request, entry.admitted_s) for entry in self._entries.values())

    def cancel(self, request_id: str) -> ServeRequest[Payload] | None:
        """Remove and return a request; None if it does not wait here."""
        return self._remove(request_id) if request_id in self._entries else None

    def expire(self, now: float) -> list[ServeRequest[Payload]]:
        """Remove and return the requests whose ``deadline_s`` is ``now`` or before, the earliest first."""
        self._sweep(now)
        expired, self._expired = self._expired, []
        return expired

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline of a waiting request, or None."""
        while self._deadlines and not self._is_current(self._deadlines[0][2], self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def oldest_s(self) -> float | None:
        """Return the time at which the longest waiting request was pushed, or None if none waits."""
        return next(iter(self._entries.values())).admitted_s if self._entries else None

    def retry_after_s(self, now: float) -> float:
        """Return the estimated seconds until all waiting requests have left, at most 60.

        The rate is that of the last 64 departures.
        """
        if len(self._departures_s) < 2 or now <= self._departures_s[0]:
            return _RETRY_AFTER_S
        departures_per_s = len(self._departures_s) / (now - self._departures_s[0])
        return min(len(self._entries) / departures_per_s, _MAX_RETRY_AFTER_S)

    def _is_current(self, request_id: str, sequence: int) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.sequence == sequence

    def _remove(self, request_id: str) -> ServeRequest[Payload]:
        entry = self._entries.pop(request_id)
        remaining = self._lane_sizes[entry.lane] - 1
        if remaining:
            self._lane_sizes[entry.lane] = remaining
        else:  # all that its heap still holds is stale
            del self._lane_sizes[entry.lane], self._orders[entry.lane]
        order = self._orders.get(entry.lane, [])
        if len(order) > 2 * remaining + _MIN_STALE:
            self._orders[entry.lane] = self._current(order)
        if len(self._deadlines) > 2 * len(self._entries) + _MIN_STALE:
            self._deadlines = self._current(self._deadlines)
        return entry.request

    def _current(self, heap: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
        """Return ``heap`` without its stale entries."""
        kept = [item for item in heap if self._is_current(item[2], item[1])]
        heapq.heapify(kept)
        return kept

    def _sweep(self, now: float) -> None:
        """Move expired requests out of the order, so that they are neither served nor counted against the bound."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, request_id = heapq.heappop(self._deadlines)
            if self._is_current(request_id, sequence):
                self._expired.append(self._remove(request_id))
