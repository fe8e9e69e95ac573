"""Bucketed padding: batch only requests of similar length (BatchMaker section 7.1's baseline: MXNet, TensorFlow)."""

from __future__ import annotations

from typing import Generic

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.baselines.request_pool import RequestPool, Result
from mlsys_core.loop.protocols import WorkerId
from mlsys_core.loop.request import Payload, ServeRequest


class Bucketed(Generic[Payload, Result]):
    """Bucket i holds lengths in (i * width, (i + 1) * width]; workers take from the non-empty buckets in turn.

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
        self._pool = pool = RequestPool[Payload, Result](
            max_batch_size=max_batch_size, max_waiting=max_waiting, lane_of=self.bucket_of
        )
        self.cancel, self.expire, self.complete, self.fail = pool.cancel, pool.expire, pool.complete, pool.fail
        self._width = bucket_width
        self._max_length = max_length
        self._last_bucket = -1

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return self._pool.num_unfinished

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
        self._pool.add(request, now)

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of the next non-empty bucket after the one served last."""
        buckets = self._pool.waiting.lanes
        if not buckets:
            return None
        later = [bucket for bucket in buckets if bucket > self._last_bucket]
        bucket = self._last_bucket = min(later or buckets)
        return self._pool.dispatch(worker, now, lane=bucket, padded_length=(bucket + 1) * self._width)

    def wake_at(self, now: float) -> float | None:
        """Return the next deadline: only for it does time matter."""
        return self._pool.next_deadline_s()
