"""All executors of a loop behind one ``wait``: the loop's view of its workers.

One executor is waited for directly, without a hand-over between threads; several are in :mod:`.many_workers`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from mlsys_core.loop.protocols import Batch, Clock, Executor, Output, WorkerId

_logger = logging.getLogger(__name__)
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


class OneWorker(Generic[Batch, Output]):
    """A single executor, waited for in the loop's own thread."""

    def __init__(self, executor: Executor[Batch, Output], clock: Clock) -> None:
        self.executors = (executor,)
        self._executor = executor
        self._clock = clock

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        """See :class:`Workers`."""
        try:
            done = self._executor.wait(timeout_until(until_s, self._clock))
        except Exception as error:  # noqa: BLE001 - an executor that dies must not take the loop with it
            return Lost(WorkerId(0), error)
        return None if done is None else Completion(WorkerId(0), *done)

    def interrupt(self) -> None:
        """See :class:`Workers`."""
        self._executor.interrupt()

    def close(self) -> None:
        """See :class:`Workers`."""
        close_all(self.executors)


def close_all(executors: Sequence[Executor[Any, Any]]) -> None:
    """Close executors; their exceptions are logged."""
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


def timeout_until(until_s: float | None, clock: Clock) -> float | None:
    """Return the seconds from now to ``until_s``, at least 0; None: no bound."""
    return None if until_s is None else max(until_s - clock.now(), 0.0)
