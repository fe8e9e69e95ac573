"""DelayBatch: wait a while for more requests (DVABatch's baseline with a tuned T_window; Triton's dynamic batcher)."""

from __future__ import annotations

import math
from typing import Generic

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.baselines.batch import RequestBatch
from mlsys_core.loop.baselines.request_pool import RequestPool, Result
from mlsys_core.loop.protocols import WorkerId
from mlsys_core.loop.request import Payload


class DelayBatch(Generic[Payload, Result]):
    """Dispatches when ``max_batch_size`` requests wait, or when one has waited for ``delay_s``.

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
        self._pool = pool = RequestPool[Payload, Result](max_batch_size=max_batch_size, max_waiting=max_waiting)
        self.add, self.cancel, self.expire = pool.add, pool.cancel, pool.expire
        self.complete, self.fail = pool.complete, pool.fail
        self._delay_s = delay_s

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        return self._pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> RequestBatch[Payload] | None:
        """Return a batch of the waiting requests, if they are enough or have waited long enough."""
        window_end_s = self._window_end_s()
        if len(self._pool.waiting) >= self._pool.max_batch_size or (window_end_s is not None and window_end_s <= now):
            return self._pool.dispatch(worker, now)
        return None

    def wake_at(self, now: float) -> float | None:
        """Return the end of the window or the next deadline, whichever is first."""
        times_s = (self._window_end_s(), self._pool.next_deadline_s())
        return min((time_s for time_s in times_s if time_s is not None and time_s > now), default=None)

    def drain(self, now: float) -> None:
        """Wait for no further requests."""
        self._delay_s = 0.0

    def _window_end_s(self) -> float | None:
        oldest_s = self._pool.waiting.oldest_s()
        return None if oldest_s is None else oldest_s + self._delay_s
