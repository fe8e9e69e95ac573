"""ZeroBatch: never wait for more requests (DVABatch, section 8's baseline with T_window = 0; Triton's default)."""

from __future__ import annotations

from typing import Generic

from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.baselines.request_pool import RequestPool, Result
from mlsys_core.loop.protocols import WorkerId
from mlsys_core.loop.request import Payload


class ZeroBatch(Generic[Payload, Result]):
    """Dispatches the waiting requests as soon as a worker has room, up to ``max_batch_size``; work-conserving.

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

    def __init__(self, *, max_batch_size: int, max_waiting: int | None = None) -> None:
        self._pool = pool = RequestPool[Payload, Result](max_batch_size=max_batch_size, max_waiting=max_waiting)
        self.add, self.cancel, self.expire = pool.add, pool.cancel, pool.expire
        self.complete, self.fail = pool.complete, pool.fail

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return self._pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of all waiting requests, or as many as fit."""
        return self._pool.dispatch(worker, now)

    def wake_at(self, now: float) -> float | None:
        """Return the next deadline: only for it does time matter."""
        return self._pool.next_deadline_s()
