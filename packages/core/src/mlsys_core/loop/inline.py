"""Executor that runs each batch in the thread that waits for it; it blocks on C queues and never spins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.protocols import Batch, Output
from mlsys_core.loop.workers import take


def require_in_flight(max_in_flight: int) -> int:
    """Return ``max_in_flight`` if it is valid for an executor.

    Raises:
        InvalidInputError: it is below 1.
    """
    if max_in_flight < 1:
        raise InvalidInputError(f"max_in_flight={max_in_flight}: an executor takes at least 1 batch at a time")
    return max_in_flight


class InlineExecutor(Generic[Batch, Output]):
    """Runs each batch inside ``wait``, in the thread that waits: no thread, no hand-over.

    For work that releases nothing to overlap with, and for tests. While a batch runs the loop admits and cancels
    nothing.

    Args:
        fn: takes a batch and returns its output; an exception becomes the output.
        max_in_flight: batches taken before the first has run.

    Raises:
        InvalidInputError: ``max_in_flight`` is below 1.

    Example:
        >>> executor = InlineExecutor(lambda batch: batch * 2)
        >>> executor.submit(21)
        >>> executor.wait(None)
        (21, 42)
    """

    def __init__(self, fn: Callable[[Batch], Output], *, max_in_flight: int = 1) -> None:
        self.max_in_flight = require_in_flight(max_in_flight)
        self._fn = fn
        self._tasks: SimpleQueue[tuple[Batch] | None] = SimpleQueue()  # None: an interrupt
        self._closed = False

    def submit(self, batch: Batch) -> None:
        """Queue ``batch`` for the next ``wait``.

        Raises:
            ServingError: the executor is closed.
        """
        if self._closed:
            raise ServingError("this executor is closed: make a new one")
        self._tasks.put((batch,))

    def wait(self, timeout_s: float | None) -> tuple[Batch, Output | BaseException] | None:
        """Run the oldest batch and return it with its output; see :class:`~mlsys_core.loop.protocols.Executor`."""
        task = take(self._tasks, timeout_s)
        if task is None:
            return None
        (batch,) = task
        try:
            return batch, self._fn(batch)
        except Exception as error:  # noqa: BLE001 - a request boundary: reported to the scheduler
            return batch, error

    def interrupt(self) -> None:
        """Make a waiting ``wait`` without work return."""
        self._tasks.put(None)

    def close(self) -> None:
        """Refuse further batches and drop those not yet run."""
        self._closed = True
        with suppress(Empty):  # no look before the get: a signal handler may close it in between
            while True:
                self._tasks.get_nowait()
