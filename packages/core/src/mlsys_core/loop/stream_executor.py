"""An executor over a device stream: batches are issued without waiting, and return when the device is done.

The same for every kind of device that :func:`mlsys_core.device.get_device` knows. Nothing is called back: a signal
stands behind each batch on the stream, and ``wait`` asks for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol

from mlsys_core.device.protocols import Device, Event, Stream
from mlsys_core.errors import ServingError
from mlsys_core.loop.executors import require_in_flight
from mlsys_core.loop.protocols import Batch, Clock, Output

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
        self._interrupted = threading.Event()

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
            if self._interrupted.is_set():
                self._interrupted.clear()
                return None
            if until_s is not None and self._clock.now() >= until_s:
                return None
            if self._in_progress:
                time.sleep(_POLL_S)
            else:
                self._interrupted.wait(None if until_s is None else max(0.0, until_s - self._clock.now()))

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        self._interrupted.set()

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
