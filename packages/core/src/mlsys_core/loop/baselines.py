"""Request-level baselines: schedulers that batch whole requests, for comparison with iterations, cells and stages.

Their requests are :class:`~mlsys_core.loop.queue.ServeRequest`, their batches :class:`RequestBatch`, and the
output of a batch is a sequence of one result per request. Within a queue (a bucket of ``Bucketed``) all serve the
smallest ``priority`` first and equals first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.protocols import Finished, FinishReason, WorkerId
from mlsys_core.loop.queue import Payload, PayloadOut, RequestQueue, ServeRequest

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RequestBatch(Generic[PayloadOut]):
    """Requests that an executor runs at once. Its output is a sequence with one result per request, in their order.

    A result that is an exception fails its request alone.

    Example:
        >>> requests = (ServeRequest("a", None, length=21), ServeRequest("b", None, length=24))
        >>> batch = RequestBatch(requests, 30, WorkerId(0))
        >>> batch.size, batch.num_padded_units, batch.padding_waste
        (2, 60, 0.25)
    """

    requests: tuple[ServeRequest[PayloadOut], ...]  # at least one, in the order they were taken from the queue
    padded_length: int  # units to which each is padded, at least the longest length
    worker: WorkerId

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def num_units(self) -> int:
        """Units asked for: the sum of the lengths."""
        return sum(request.length for request in self.requests)

    @property
    def num_padded_units(self) -> int:
        """Units computed, padding included."""
        return self.size * self.padded_length

    @property
    def padding_waste(self) -> float:
        """Share of ``num_padded_units`` that is padding, in [0, 1)."""
        return 1.0 - self.num_units / self.num_padded_units


class RequestPool(Generic[Payload, Result]):
    """Requests from admission to departure: all of a baseline but its decision when to dispatch how many.

    A waiting request expires when its deadline comes; one in flight runs to the end of its batch and is EXPIRED if that
    ends after its deadline. One cancelled in flight leaves as CANCELLED with its batch. A batch that fails fails its
    requests: nothing is retried.

    Args:
        max_batch_size: most requests in a batch.
        max_waiting: most requests waiting; None for no bound. Beyond it ``add`` raises ``QueueFullError``.
        lane_of: see :class:`~mlsys_core.loop.queue.RequestQueue`.

    Raises:
        InvalidInputError: ``max_batch_size`` or ``max_waiting`` is below 1.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_waiting: int | None = None,
        lane_of: Callable[[ServeRequest[Payload]], int] | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise InvalidInputError(f"a batch takes at least 1 request, got {max_batch_size}")
        self._max_batch_size = max_batch_size
        self._waiting: RequestQueue[Payload] = RequestQueue(max_size=max_waiting, lane_of=lane_of)
        self._in_flight: dict[str, bool] = {}  # id -> whether it was cancelled meanwhile

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return len(self._waiting) + len(self._in_flight)

    def add(self, request: ServeRequest[Payload], now: float) -> None:
        """Admit ``request``.

        Raises:
            QueueFullError: ``max_waiting`` requests wait.
            InvalidInputError: its id belongs to an unfinished request.
        """
        if request.request_id in self._in_flight:
            raise InvalidInputError(
                f"request id {request.request_id!r} is in flight: ids must be unique until they finish"
            )
        self._waiting.push(request, now)

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Result]]:
        """Drop a request: at once if it waits, with its batch if it is in flight; unknown ids are ignored."""
        if self._waiting.cancel(request_id) is not None:
            return [Finished(request_id, FinishReason.CANCELLED)]
        if request_id in self._in_flight:
            self._in_flight[request_id] = True
        return ()

    def expire(self, now: float) -> Sequence[Finished[Result]]:
        """Return the waiting requests whose deadline has come."""
        return [Finished(request.request_id, FinishReason.EXPIRED) for request in self._waiting.expire(now)]

    def _dispatch(
        self, worker: WorkerId, now: float, *, lane: int = 0, padded_length: int | None = None
    ) -> RequestBatch[Payload] | None:
        """Return the next requests of ``lane`` as a batch in flight, as many as fit; None if none waits.

        Args:
            worker: the worker that runs it.
            now: seconds of the loop's clock.
            lane: of the queue.
            padded_length: None pads to the longest of them.
        """
        requests: list[ServeRequest[Payload]] = []
        while len(requests) < self._max_batch_size:
            request = self._waiting.pop(now, lane=lane)
            if request is None:
                break
            requests.append(request)
            self._in_flight[request.request_id] = False
        if not requests:
            return None
        if padded_length is None:
            padded_length = max(request.length for request in requests)
        return RequestBatch(tuple(requests), padded_length, worker)

    def complete(
        self, batch: RequestBatch[Payload], output: Sequence[Result | BaseException], now: float
    ) -> Sequence[Finished[Result]]:
        """Let each request of ``batch`` leave with its result; an output of another length fails the batch."""
        try:
            results = list(output)
        except Exception as error:  # noqa: BLE001 - the executor's fault, so its batch's and nobody else's
            return self.fail(batch, error, now)
        if len(results) != batch.size:
            mismatch = f"the executor gave {len(results)} results for a batch of {batch.size} requests"
            return self.fail(batch, ServingError(mismatch), now)
        return [self._leave(request, result, now) for request, result in zip(batch.requests, results, strict=True)]

    def fail(self, batch: RequestBatch[Payload], error: BaseException, now: float) -> Sequence[Finished[Result]]:
        """Let each request of ``batch`` leave with ``error``."""
        return [self._leave(request, error, now) for request in batch.requests]

    def wake_at(self, now: float) -> float | None:
        """Return the earliest deadline of a waiting request: by default time matters for it only."""
        return self._waiting.next_deadline_s()

    def _leave(self, request: ServeRequest[Any], result: Result | BaseException, now: float) -> Finished[Result]:
        was_cancelled = self._in_flight.pop(request.request_id)
        if was_cancelled:
            return Finished(request.request_id, FinishReason.CANCELLED)
        if isinstance(result, BaseException):
            return Finished(request.request_id, FinishReason.FAILED, error=result)
        if request.deadline_s is not None and now > request.deadline_s:
            return Finished(request.request_id, FinishReason.EXPIRED)
        return Finished(request.request_id, FinishReason.DONE, result)


class ZeroBatch(RequestPool[Payload, Result]):
    """Dispatches the waiting requests as soon as a worker has room, up to ``max_batch_size``; work-conserving.

    DVABatch's baseline with T_window = 0 (section 8), and Triton's default.

    Args:
        max_batch_size: most requests in a batch.
        max_waiting: most requests waiting; None for no bound.

    Raises:
        InvalidInputError: a size is below 1.

    Example:
        >>> from mlsys_core.loop import ServeRequest
        >>> scheduler = ZeroBatch(max_batch_size=2)
        >>> for name in "abc":
        ...     scheduler.add(ServeRequest(name, None), 0.0)
        >>> [request.request_id for request in scheduler.next_batch(WorkerId(0), 0.0).requests]
        ['a', 'b']
    """

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of all waiting requests, or as many as fit."""
        return self._dispatch(worker, now)


class DelayBatch(RequestPool[Payload, Result]):
    """Dispatches when ``max_batch_size`` requests wait, or one has waited for ``delay_s`` (DVABatch's tuned T_window).

    The window is that of the longest waiting request, as in Triton: it runs while workers are busy too, so a worker
    that gets free after its end takes the waiting requests at once. Once draining there is nobody to wait for.

    Args:
        max_batch_size: most requests in a batch.
        delay_s: the window, seconds; 0 is ZeroBatch.
        max_waiting: most requests waiting; None for no bound.

    Raises:
        InvalidInputError: a size is below 1, or ``delay_s`` negative or not finite.

    Example:
        >>> from mlsys_core.loop import ServeRequest
        >>> scheduler = DelayBatch(max_batch_size=8, delay_s=0.010)
        >>> scheduler.add(ServeRequest("a", None), 0.0)
        >>> scheduler.next_batch(WorkerId(0), 0.0) is None, scheduler.wake_at(0.0)
        (True, 0.01)
    """

    def __init__(self, *, max_batch_size: int, delay_s: float, max_waiting: int | None = None) -> None:
        if not 0 <= delay_s < math.inf:
            raise InvalidInputError(f"delay_s={delay_s}: the window must be 0 or more seconds, and finite")
        super().__init__(max_batch_size=max_batch_size, max_waiting=max_waiting)
        self._delay_s = delay_s

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of the waiting requests, if they are enough or have waited long enough."""
        window_end_s = self._window_end_s()
        if len(self._waiting) >= self._max_batch_size or (window_end_s is not None and window_end_s <= now):
            return self._dispatch(worker, now)
        return None

    def wake_at(self, now: float) -> float | None:
        """Return the end of the window or the next deadline, whichever is first."""
        times_s = (self._window_end_s(), self._waiting.next_deadline_s())
        return min((time_s for time_s in times_s if time_s is not None and time_s > now), default=None)

    def drain(self, now: float) -> None:
        """Wait for no further requests."""
        self._delay_s = 0.0

    def _window_end_s(self) -> float | None:
        oldest_s = self._waiting.oldest_s()
        return None if oldest_s is None else oldest_s + self._delay_s


class StaticBatch(RequestPool[Payload, Result]):
    """Dispatches exactly ``batch_size`` requests, after any wait; for models compiled for one size.

    Fewer are dispatched only once draining, as no more will come. For a bound on the wait take
    :class:`DelayBatch`.

    Args:
        batch_size: requests in a batch.
        max_waiting: most requests waiting, at least ``batch_size``; None for no bound.

    Raises:
        InvalidInputError: a size is below 1, or no batch could ever fill.

    Example:
        >>> from mlsys_core.loop import ServeRequest
        >>> scheduler = StaticBatch(batch_size=2)
        >>> scheduler.add(ServeRequest("a", None), 0.0)
        >>> scheduler.next_batch(WorkerId(0), 0.0) is None
        True
        >>> scheduler.drain(1.0)
        >>> scheduler.next_batch(WorkerId(0), 1.0).size
        1
    """

    def __init__(self, *, batch_size: int, max_waiting: int | None = None) -> None:
        if max_waiting is not None and max_waiting < batch_size:
            raise InvalidInputError(
                f"max_waiting={max_waiting} is below batch_size={batch_size}: no batch would ever fill"
            )
        super().__init__(max_batch_size=batch_size, max_waiting=max_waiting)
        self._min_batch_size = batch_size

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a full batch, if there is one."""
        return self._dispatch(worker, now) if len(self._waiting) >= self._min_batch_size else None

    def drain(self, now: float) -> None:
        """Dispatch the waiting requests even if they do not fill a batch."""
        self._min_batch_size = 1


class Bucketed(RequestPool[Payload, Result]):
    """Bucket i holds lengths in (i * width, (i + 1) * width]; workers take from the non-empty buckets in turn.

    The baseline of BatchMaker's section 7.1 (MXNet, TensorFlow).
    There is no timeout: a batch that is not full starts when a worker has room and it is the bucket's turn. Graphs are
    prepared per bucket, so every request is padded to the bucket's upper bound (width 10: 21 to 30), not to the
    longest.

    Args:
        max_batch_size: most requests in a batch.
        bucket_width: of all buckets, in units of ``ServeRequest.length``.
        max_length: longest request accepted, for models with a bound; None for no bound.
        max_waiting: most requests waiting, over all buckets; None for no bound.

    Raises:
        InvalidInputError: a size, the width or the length is below 1.

    Example:
        >>> from mlsys_core.loop import ServeRequest
        >>> scheduler = Bucketed(max_batch_size=8)
        >>> scheduler.add(ServeRequest("a", None, length=21), 0.0)
        >>> scheduler.add(ServeRequest("b", None, length=20), 0.0)
        >>> [scheduler.next_batch(WorkerId(0), 0.0).padded_length for _ in range(2)]
        [20, 30]
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        bucket_width: int = 10,
        max_length: int | None = None,
        max_waiting: int | None = None,
    ) -> None:
        for name, value in (("bucket_width", bucket_width), ("max_length", max_length)):
            if value is not None and value < 1:
                raise InvalidInputError(f"{name}={value}: at least 1 is needed")
        super().__init__(max_batch_size=max_batch_size, max_waiting=max_waiting, lane_of=self.bucket_of)
        self._width = bucket_width
        self._max_length = max_length
        self._last_bucket = -1

    def bucket_of(self, request: ServeRequest[Payload]) -> int:
        """Return the number of the bucket for ``request``, from 0."""
        return (request.length - 1) // self._width

    def add(self, request: ServeRequest[Payload], now: float) -> None:
        """Admit ``request``.

        Raises:
            QueueFullError: ``max_waiting`` requests wait.
            InvalidInputError: it is longer than ``max_length``, or its id belongs to an unfinished request.
        """
        if self._max_length is not None and request.length > self._max_length:
            raise InvalidInputError(
                f"request {request.request_id!r} has length {request.length}: at most {self._max_length} is served here"
            )
        super().add(request, now)

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of the next non-empty bucket after the one served last."""
        buckets = self._waiting.lanes
        if not buckets:
            return None
        later = [bucket for bucket in buckets if bucket > self._last_bucket]
        bucket = self._last_bucket = min(later or buckets)
        return self._dispatch(worker, now, lane=bucket, padded_length=(bucket + 1) * self._width)
