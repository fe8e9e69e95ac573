"""Executors around a function of one batch: on a worker thread, or over a device's stream.

Below the loop, above the computation, as :class:`~mlsys_core.loop.inline.InlineExecutor`, which runs batches in the
waiting thread. A :class:`ThreadExecutor` blocks on C queues and never spins. A :class:`StreamExecutor` issues batches
without waiting, the same for every kind of device that :func:`mlsys_core.device.get_device` knows: nothing is called
back, a signal stands behind each batch on the stream, and ``wait`` asks for it. The simulated one is in
:mod:`mlsys_core.loop.simulated`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Protocol, Self

from mlsys_core.device.protocols import Device, Event, Stream
from mlsys_core.errors import ServingError
from mlsys_core.loop.inline import require_in_flight
from mlsys_core.loop.many_workers import QueuedWorkers
from mlsys_core.loop.protocols import Batch, Clock, Output, WorkerId
from mlsys_core.loop.workers import Completion, Workers, take


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


_POLL_S = 20e-6


class Signal(Protocol):
    """Counts the completed part of a stream's issued work."""

    def record(self, stream: Stream) -> None:
        """Issue a signal behind all work issued to ``stream`` so far."""
        ...

    def num_done(self) -> int:
        """Return the number of signals that have been reached, in order; does not wait."""
        ...


class EventSignal:
    """Events of a device, asked one by one.

    Args:
        device: of the stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: deque[Event] = deque()
        self._num_done = 0

    def record(self, stream: Stream) -> None:
        """See :class:`Signal`."""
        event = self._device.event()
        stream.record(event)
        self._events.append(event)

    def num_done(self) -> int:
        """See :class:`Signal`."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._num_done += 1
        return self._num_done


class StreamExecutor(Generic[Batch, Output]):
    """Issues batches to a stream of its own and takes them back in order.

    Args:
        issue: takes a batch and returns its output, which is valid when the device is done; called on the stream. An
            exception becomes the output.
        device: makes the stream.
        clock: the loop's.
        max_in_flight: batches issued before the first has come back.
        signal: counts completed batches; None: events of the device.
        finish: takes an output and the time at which it became valid, and returns it with that time recorded; None: no
            change.

    Raises:
        InvalidInputError: ``max_in_flight`` is below 1.

    Example:
        >>> from mlsys_core.device import get_device
        >>> from mlsys_core.loop import WallClock
        >>> with_stream = StreamExecutor(lambda batch: sum(batch), get_device("cpu"), WallClock())
        >>> with_stream.submit([1, 2])
        >>> with_stream.wait(None)
        ([1, 2], 3)
        >>> with_stream.close()
    """

    def __init__(
        self,
        issue: Callable[[Batch], Output],
        device: Device,
        clock: Clock,
        *,
        max_in_flight: int = 1,
        signal: Callable[[Stream], Signal] | None = None,
        finish: Callable[[Output, float], Output] | None = None,
    ) -> None:
        self.max_in_flight = require_in_flight(max_in_flight)
        self._issue = issue
        self._clock = clock
        self._finish = finish
        self._stream = device.stream()
        self._signal = EventSignal(device) if signal is None else signal(self._stream)
        self._in_progress: deque[tuple[Batch, list[Output | BaseException]]] = deque()
        self._num_taken = 0
        self._interrupts: SimpleQueue[None] = SimpleQueue()

    def submit(self, batch: Batch) -> None:
        """Issue ``batch``; an exception becomes its output, in its turn."""
        made: list[Output | BaseException] = []
        self._stream.submit(self._run, batch, made)
        self._in_progress.append((batch, made))
        self._signal.record(self._stream)

    def wait(self, timeout_s: float | None) -> tuple[Batch, Output | BaseException] | None:
        """Return the oldest batch with its output once it is done; None at the timeout or when interrupted."""
        until_s = None if timeout_s is None else self._clock.now() + timeout_s
        while True:
            if self._in_progress and self._signal.num_done() > self._num_taken:
                return self._take()
            if not self._interrupts.empty():
                return self._interrupts.get()
            if until_s is not None and self._clock.now() >= until_s:
                return None
            if self._in_progress:
                time.sleep(_POLL_S)
            else:
                return take(self._interrupts, None if until_s is None else until_s - self._clock.now())

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        self._interrupts.put(None)

    def close(self) -> None:
        """Drop batches in progress, and close the stream."""
        self._in_progress.clear()
        self._stream.close()

    def _take(self) -> tuple[Batch, Output | BaseException]:
        self._num_taken += 1
        batch, made = self._in_progress.popleft()
        output = made[0] if made else ServingError("the device skipped this batch: an earlier one has failed")
        if self._finish is not None and not isinstance(output, BaseException):
            output = self._finish(output, self._clock.now())
        return batch, output

    def _run(self, batch: Batch, made: list[Output | BaseException]) -> None:
        try:
            made.append(self._issue(batch))
        except Exception as error:  # noqa: BLE001 - a request boundary: reported to the scheduler
            made.append(error)
