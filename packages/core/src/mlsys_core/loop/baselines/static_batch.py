"""StaticBatch: one batch size and no other, for models compiled for it."""

from __future__ import annotations

from typing import Generic

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.baselines.request_pool import RequestPool, Result
from mlsys_core.loop.protocols import WorkerId
from mlsys_core.loop.request import Payload


class StaticBatch(Generic[Payload, Result]):
    """Dispatches exactly ``batch_size`` requests, after any wait.

    Fewer are dispatched only once draining, as no more will come. For a bound on the wait take
    :class:`~mlsys_core.loop.baselines.delay_batch.DelayBatch`.

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
        self._pool = pool = RequestPool[Payload, Result](max_batch_size=batch_size, max_waiting=max_waiting)
        self.add, self.cancel, self.expire = pool.add, pool.cancel, pool.expire
        self.complete, self.fail = pool.complete, pool.fail
        self._min_batch_size = batch_size

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return self._pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a full batch, if there is one."""
        return self._pool.dispatch(worker, now) if len(self._pool.waiting) >= self._min_batch_size else None

    def wake_at(self, now: float) -> float | None:
        """Return the next deadline: only for it does time matter."""
        return self._pool.next_deadline_s()

    def drain(self, now: float) -> None:
        """Dispatch the waiting requests even if they do not fill a batch."""
        self._min_batch_size = 1
