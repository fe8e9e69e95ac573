"""Executors around a function of one batch: in the caller's thread, or on a worker thread of its own.

Below the loop, above the computation: real engines wrap their runner's ``step`` in a :class:`ThreadExecutor`. Both
block on C queues and never spin. The simulated one is in :mod:`mlsys_core.loop.simulated`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Self

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.protocols import Batch, Clock, Output, WorkerId
from mlsys_core.loop.workers import Completion, QueuedWorkers, Workers, take


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
        while not self._tasks.empty():
            self._tasks.get()


class ThreadExecutor(Generic[Batch, Output]):
    """Runs batches one after another on a worker thread of its own, so that the loop can schedule meanwhile.

    Args:
        fn: takes a batch and returns its output, always on the worker thread; an exception becomes the output.
        max_in_flight: batches taken before the first has completed: 1 runs nothing while the loop schedules, 2 always
            has the next batch at hand.
        name: of the thread, in debuggers and timelines.
        close_timeout_s: how long ``close`` waits for a batch that is running; past it the thread is left behind (it is
            a daemon).

    Raises:
        InvalidInputError: ``max_in_flight`` is below 1.

    Example:
        >>> with ThreadExecutor(lambda batch: sum(batch)) as executor:
        ...     executor.submit([1, 2])
        ...     executor.wait(None)
        ([1, 2], 3)
    """

    def __init__(
        self,
        fn: Callable[[Batch], Output],
        *,
        max_in_flight: int = 1,
        name: str = "executor",
        close_timeout_s: float = 10.0,
    ) -> None:
        self.max_in_flight = require_in_flight(max_in_flight)
        self._fn = fn
        self._close_timeout_s = close_timeout_s
        self._closed = False
        self._tasks: SimpleQueue[tuple[Batch] | None] = SimpleQueue()  # None: the end
        self.worker = WorkerId(0)  # this and the next are set by a loop that has several
        self.completed: SimpleQueue[Completion[Batch, Output] | None] = SimpleQueue()  # None: an interrupt
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def as_workers(executors: Sequence[ThreadExecutor[Any, Any]], clock: Clock) -> Workers[Any, Any]:
        """Return ``executors`` behind one wait."""
        return QueuedWorkers(executors, clock)

    def submit(self, batch: Batch) -> None:
        """Hand ``batch`` to the worker thread.

        Raises:
            ServingError: the executor is closed.
        """
        if self._closed:
            raise ServingError("this executor is closed: make a new one")
        self._tasks.put((batch,))

    def wait(self, timeout_s: float | None) -> tuple[Batch, Output | BaseException] | None:
        """Return the oldest completed batch with its output; see :class:`~mlsys_core.loop.protocols.Executor`."""
        done = take(self.completed, timeout_s)
        return None if done is None else (done.batch, done.output)

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        self.completed.put(None)

    def close(self) -> None:
        """Stop the thread after the batch that is running, if any; batches not yet started are dropped. Idempotent."""
        self._closed = True
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._close_timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            (batch,) = task
            try:
                self.completed.put(Completion(self.worker, batch, self._fn(batch)))
            except BaseException as error:  # noqa: BLE001 - a request boundary: reported to the scheduler, the thread lives on
                self.completed.put(Completion(self.worker, batch, error))
            del batch, task  # hold no tensors while waiting for the next
