"""State common to the request-level baselines: waiting requests, requests in flight, and their departures.

A baseline holds one :class:`RequestPool`, offers the pool's methods as its own, and adds the one decision of its own:
when to dispatch how many requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.protocols import Finished, FinishReason, WorkerId
from mlsys_core.loop.queue import RequestQueue
from mlsys_core.loop.request import Payload, ServeRequest

Result = TypeVar("Result")


class RequestPool(Generic[Payload, Result]):
    """Requests from admission to departure.

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
        max_waiting: int | None,
        lane_of: Callable[[ServeRequest[Payload]], int] | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise InvalidInputError(f"a batch takes at least 1 request, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self.waiting: RequestQueue[Payload] = RequestQueue(max_size=max_waiting, lane_of=lane_of)
        self._in_flight: dict[str, bool] = {}  # id -> whether it was cancelled meanwhile

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return len(self.waiting) + len(self._in_flight)

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
        self.waiting.push(request, now)

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Result]]:
        """Drop a request: at once if it waits, with its batch if it is in flight; unknown ids are ignored."""
        if self.waiting.cancel(request_id) is not None:
            return [Finished(request_id, FinishReason.CANCELLED)]
        if request_id in self._in_flight:
            self._in_flight[request_id] = True
        return ()

    def expire(self, now: float) -> Sequence[Finished[Result]]:
        """Return the waiting requests whose deadline has come."""
        return [Finished(request.request_id, FinishReason.EXPIRED) for request in self.waiting.expire(now)]

    def dispatch(
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
        while len(requests) < self.max_batch_size:
            request = self.waiting.pop(now, lane=lane)
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

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline of a waiting request: the next time at which ``expire`` returns any."""
        return self.waiting.next_deadline_s()

    def _leave(self, request: ServeRequest[Any], result: Result | BaseException, now: float) -> Finished[Result]:
        was_cancelled = self._in_flight.pop(request.request_id)
        if was_cancelled:
            return Finished(request.request_id, FinishReason.CANCELLED)
        if isinstance(result, BaseException):
            return Finished(request.request_id, FinishReason.FAILED, error=result)
        if request.deadline_s is not None and now > request.deadline_s:
            return Finished(request.request_id, FinishReason.EXPIRED)
        return Finished(request.request_id, FinishReason.DONE, result)
