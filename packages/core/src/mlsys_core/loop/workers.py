"""All executors of a loop behind one ``wait``: the loop's view of its workers.

One executor is waited for directly, without a hand-over between threads. Each of several gets a thread that does
nothing but wait for it. An executor class that knows a better way to wait for several of its kind (virtual time, one
selector over many sockets, :class:`QueuedWorkers`) offers a static method ``as_workers(executors, clock) -> Workers``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.protocols import Batch, Clock, Executor, Output, WorkerId

_logger = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 10.0
MAIN_THREAD_SLICE_S = 0.25  # longest wait of the main thread in one piece
_Item = TypeVar("_Item")


class Completion(NamedTuple, Generic[Batch, Output]):
    """A batch that came back from ``worker``."""

    worker: WorkerId
    batch: Batch
    output: Output | BaseException


class Lost(NamedTuple):
    """The loss of ``worker``'s executor, which can run nothing any more."""

    worker: WorkerId
    error: Exception


class Workers(Protocol[Batch, Output]):
    """Several executors behind one wait; worker ``i`` is ``executors[i]``."""

    @property
    def executors(self) -> Sequence[Executor[Batch, Output]]:
        """Executors by worker."""
        ...

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        """Return the next completion of any worker; None when interrupted, or at ``until_s`` (None: no bound)."""
        ...

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon. Callable from any thread."""
        ...

    def close(self) -> None:
        """Close all executors; idempotent. Their exceptions are logged."""
        ...


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
    return _OneWorker(first, clock) if len(executors) == 1 else _PumpedWorkers(executors, clock)


class _OneWorker(Generic[Batch, Output]):
    """A single executor, waited for in the loop's own thread."""

    def __init__(self, executor: Executor[Batch, Output], clock: Clock) -> None:
        self.executors = (executor,)
        self._executor = executor
        self._clock = clock

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        try:
            done = self._executor.wait(_timeout_s(until_s, self._clock))
        except Exception as error:  # noqa: BLE001 - an executor that dies must not take the loop with it
            return Lost(WorkerId(0), error)
        return None if done is None else Completion(WorkerId(0), *done)

    def interrupt(self) -> None:
        self._executor.interrupt()

    def close(self) -> None:
        _close(self.executors)


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
        """See :class:`Workers`."""
        return take(self._completed, _timeout_s(until_s, self._clock))

    def interrupt(self) -> None:
        """See :class:`Workers`."""
        self._completed.put(None)

    def close(self) -> None:
        """See :class:`Workers`."""
        _close(self.executors)


class _PumpedWorkers(Generic[Batch, Output]):
    """Several executors, each with a thread that waits for it and passes on its completions."""

    def __init__(self, executors: Sequence[Executor[Batch, Output]], clock: Clock) -> None:
        self.executors = tuple(executors)
        self._clock = clock
        self._arrived: SimpleQueue[Completion[Batch, Output] | Lost | None] = SimpleQueue()  # None: an interrupt
        self._closing = False
        self._threads: list[threading.Thread] = []

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        if not self._threads:  # not in the constructor: a loop that never runs has nothing to close
            self._start()
        return take(self._arrived, _timeout_s(until_s, self._clock))

    def interrupt(self) -> None:
        self._arrived.put(None)

    def close(self) -> None:
        self._closing = True
        for executor in self.executors:
            try:
                executor.interrupt()
            except Exception:  # a lost executor; its thread has ended
                _logger.exception("an executor could not be interrupted")
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        _close(self.executors)

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


def _close(executors: Sequence[Executor[Any, Any]]) -> None:
    for executor in executors:
        try:
            executor.close()
        except Exception:  # the others still have to be closed
            _logger.exception("an executor could not be closed")


def take(queue: SimpleQueue[_Item], timeout_s: float | None) -> _Item | None:
    """Return the next item of the queue; None: ``timeout_s`` seconds have passed (None: no bound)."""
    for slice_s in _slices_s(timeout_s):
        try:
            return queue.get(timeout=slice_s)
        except Empty:
            continue
    return None


class Latch:
    """An event that is set once.

    A signal handler may interrupt ``set`` and ``wait`` anywhere and call them: unlike ``threading.Event`` there is no
    lock that it would wait for while its own thread holds it.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._woken: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Let all who wait, and will wait, go on."""
        self.is_set = True
        self._woken.put(None)

    def wait(self, timeout_s: float | None) -> bool:
        """Return True once it is set, False after ``timeout_s`` seconds (None: no bound)."""
        if not self.is_set:
            take(self._woken, timeout_s)
            if self.is_set:
                self._woken.put(None)  # for the next who waits
        return self.is_set


def _slices_s(timeout_s: float | None) -> Iterator[float | None]:
    """Yield the waits, in seconds, of which one of ``timeout_s`` consists.

    The main thread waits in slices. A signal that comes after the interpreter's last look at its signals and before
    the thread blocks does not end the wait, so its handler, which may be what stops the loop, would never run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        return
    left_s = math.inf if timeout_s is None else max(timeout_s, 0.0)
    while left_s > MAIN_THREAD_SLICE_S:
        yield MAIN_THREAD_SLICE_S
        left_s -= MAIN_THREAD_SLICE_S
    yield left_s


def _timeout_s(until_s: float | None, clock: Clock) -> float | None:
    return None if until_s is None else max(until_s - clock.now(), 0.0)
