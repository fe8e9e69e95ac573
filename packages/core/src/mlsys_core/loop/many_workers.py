"""The executors of a loop as workers: one, or several behind one wait.

Each of several gets a thread that does nothing but wait for it. An executor class that knows a better way to wait for
several of its kind (virtual time, one selector over many sockets, :class:`QueuedWorkers`) offers a static method
``as_workers(executors, clock) -> Workers``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Generic, Protocol, runtime_checkable

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.protocols import Batch, Clock, Executor, Output, WorkerId
from mlsys_core.loop.workers import Completion, Lost, OneWorker, Workers, close_all, take, timeout_until

_logger = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 10.0


@runtime_checkable
class Grouping(Protocol):
    """An executor class with its own way to wait for several executors."""

    @staticmethod
    def as_workers(executors: Sequence[Any], clock: Clock) -> Workers[Any, Any]:
        """Return ``executors``, all of this class, behind one wait."""
        ...


def workers_of(executors: Sequence[Executor[Batch, Output]], clock: Clock) -> Workers[Batch, Output]:
    """Return the fitting :class:`Workers` for ``executors``.

    Raises:
        InvalidInputError: there is none, one occurs twice, or one takes no batch.
    """
    if not executors:
        raise InvalidInputError("a serving loop needs at least one executor")
    if len({id(executor) for executor in executors}) < len(executors):
        raise InvalidInputError("the same executor stands for two workers: make one executor per worker")
    for index, executor in enumerate(executors):
        if executor.max_in_flight < 1:
            raise InvalidInputError(
                f"executor {index} has max_in_flight={executor.max_in_flight}: at least 1 is needed"
            )
    first = executors[0]
    if isinstance(first, Grouping):
        if any(type(executor) is not type(first) for executor in executors):
            raise InvalidInputError(f"{type(first).__name__} cannot share a loop with executors of other classes")
        return first.as_workers(executors, clock)
    if len(executors) == 1:
        return OneWorker(first, clock)
    return PumpedWorkers(executors, clock)


class QueuedWorkers:
    """Several executors with threads of their own, which all put their completions into one queue.

    Args:
        executors: unused so far; worker ``i`` is ``executors[i]``. Each gets its number as ``worker`` and
            the queue as ``completed``, and puts a :class:`Completion` there for each batch.
        clock: the loop's.
    """

    def __init__(self, executors: Sequence[Any], clock: Clock) -> None:
        self.executors = tuple(executors)
        self._clock = clock
        self._completed: SimpleQueue[Completion[Any, Any] | None] = SimpleQueue()
        for number, executor in enumerate(executors):
            executor.worker, executor.completed = WorkerId(number), self._completed

    def wait(self, until_s: float | None) -> Completion[Any, Any] | None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        return take(self._completed, timeout_until(until_s, self._clock))

    def interrupt(self) -> None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        self._completed.put(None)

    def close(self) -> None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        close_all(self.executors)


class PumpedWorkers(Generic[Batch, Output]):
    """Several executors, each with a thread that waits for it and passes on its completions."""

    def __init__(self, executors: Sequence[Executor[Batch, Output]], clock: Clock) -> None:
        self.executors = tuple(executors)
        self._clock = clock
        self._arrived: SimpleQueue[Completion[Batch, Output] | Lost | None] = SimpleQueue()  # None: an interrupt
        self._closing = False
        self._threads: list[threading.Thread] = []

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        if not self._threads:  # not in the constructor: a loop that never runs has nothing to close
            self._start()
        return take(self._arrived, timeout_until(until_s, self._clock))

    def interrupt(self) -> None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        self._arrived.put(None)

    def close(self) -> None:
        """See :class:`~mlsys_core.loop.workers.Workers`."""
        self._closing = True
        for executor in self.executors:
            try:
                executor.interrupt()
            except Exception:  # a lost executor; its thread has ended
                _logger.exception("an executor could not be interrupted")
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        close_all(self.executors)

    def _start(self) -> None:
        for index, executor in enumerate(self.executors):
            worker = WorkerId(index)
            thread = threading.Thread(target=self._pump, args=(worker, executor), name=f"pump-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pump(self, worker: WorkerId, executor: Executor[Batch, Output]) -> None:
        while not self._closing:
            try:
                done = executor.wait(None)
            except Exception as error:  # noqa: BLE001 - an executor that dies must not take the loop with it
                self._arrived.put(Lost(worker, error))
                return
            if done is not None:
                self._arrived.put(Completion(worker, *done))
            del done  # hold no tensors while waiting for the next
