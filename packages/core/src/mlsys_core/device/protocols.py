"""Interface between work and the device that runs it: devices, streams of ordered work, events between streams.

Planners decide on which stream each piece of work goes and which events order them; executors carry that out through
these protocols, the same for worker threads of the CPU and for CUDA. The semantics, checked for every device by one
conformance suite (``tests/core/device/test_conformance.py``), are those of CUDA:

* A stream runs what it is given in the order given. Two streams run concurrently and are ordered by events only.
* An event stands for the work submitted to a stream before ``record``. Recording it again moves it. Waiting for an
  event that was never recorded does nothing. ``wait`` takes the recording in force when it is called, so waits cannot
  deadlock.
* The first error that submitted work raises is kept. Work of that stream that has not begun is skipped until
  ``synchronize`` or ``close`` has raised the error, once; then the stream is as good as new. Events are passed and
  waits are kept even while work is skipped, so that no other stream hangs; other streams do not see the error.
* Closing a stream drains it first.

Below the protocols stand parts common to the streams of every device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from mlsys_core.errors import DeviceError, InvalidInputError


class DeviceTimeoutError(DeviceError, TimeoutError):
    """Work was not done within the given time; it goes on, and may be waited for again."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The memory of a device at one moment."""

    total_nbytes: int  # bytes this process could have at most: the device's, or the container's limit if that is lower
    available_nbytes: int  # bytes that can be had now without swapping or evicting others


class Event(Protocol):
    """A point in a stream's work; made by :meth:`Device.event`, set by :meth:`Stream.record`."""

    @property
    def timing(self) -> bool:
        """True if the event records the time at which it is passed."""
        ...

    def query(self) -> bool:
        """Return whether the work before the latest recording is done; True if the event was never recorded."""
        ...

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until :meth:`query` is True. Errors of the work are the stream's to report.

        Raises:
            DeviceTimeoutError: ``timeout_s`` seconds passed first.
            InvalidInputError: ``timeout_s`` is negative or not a number.
        """
        ...

    def elapsed_ms(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end`` on the device's own clock.

        Raises:
            DeviceError: one of the two has no timing, was not recorded or has not been passed yet.
            InvalidInputError: ``end`` belongs to another kind of device.
        """
        ...


class Stream(Protocol):
    """A queue of work that runs in order; a context manager that closes itself."""

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        """Enqueue ``fn(*args)`` behind all earlier work of this stream; what it returns is dropped.

        The CPU runs ``fn`` on the stream's worker thread. CUDA runs it at once on the calling thread with this stream
        as torch's current one: kernels it launches are the work, and run later. So ``fn`` must not rely on either
        thread's local state (such as ``torch.no_grad``), and must not synchronize or close the stream it runs on.
        ``args`` are kept until the work is done.

        Raises:
            DeviceError: the stream is closed.
        """
        ...

    def record(self, event: Event) -> None:
        """Let ``event`` stand for all work submitted so far.

        Raises:
            DeviceError: the stream is closed.
            InvalidInputError: the event belongs to another device.
        """
        ...

    def wait(self, event: Event) -> None:
        """Hold all work submitted from now on until ``event``, as recorded now, is passed; the caller is not blocked.

        Raises:
            DeviceError: the stream is closed.
            InvalidInputError: the event belongs to another kind of device.
        """
        ...

    def synchronize(self) -> None:
        """Block until all work submitted so far is done, then raise the first error it raised, once.

        On a closed stream this does nothing.
        """
        ...

    def close(self) -> None:
        """Drain the stream, free the worker, and raise an error not yet reported. Closing again does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the stream. An error of the ``with`` block goes first; the stream's own is added to it as a note."""
        ...


class Device(Protocol):
    """A device that runs work; made by :func:`mlsys_core.device.get_device`."""

    @property
    def kind(self) -> str:
        """``"cpu"``, ``"cuda"`` or the kind that a plugin registered."""
        ...

    @property
    def index(self) -> int:
        """Number of this device among those of its kind, from 0."""
        ...

    @property
    def name(self) -> str:
        """``"kind:index"``, as :func:`mlsys_core.device.get_device` takes it."""
        ...

    @property
    def torch_name(self) -> str:
        """Name of the device in torch, such as ``"cpu"`` or ``"cuda:0"``."""
        ...

    def stream(self) -> Stream:
        """Return a new stream, owned and closed by the caller."""
        ...

    def event(self, *, timing: bool = False) -> Event:
        """Return a new event, not recorded; ``timing`` lets it take part in ``elapsed_ms``."""
        ...

    def synchronize(self) -> None:
        """Block until all streams made by this object are idle, then raise the oldest stream's kept error, if any.

        Each error is raised once; call again for those of the other streams.
        """
        ...

    def memory_info(self) -> MemoryInfo:
        """Return the device's memory now."""
        ...


class ErrorLatch:
    """Holds the first error until it is raised; while it holds one, the stream skips work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def is_set(self) -> bool:
        """True if an error waits to be raised."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Hold ``error``, unless an earlier one is held."""
        with self._lock:
            if self._error is None:
                self._error = error

    def raise_kept(self) -> None:
        """Raise the held error, if any, and clear it."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame and the traceback keep each other, and the failed work's tensors, alive


class Numbered(Protocol):
    """A stream as seen by its device."""

    number: int
    errors: ErrorLatch


def close_after(stream: Stream, error: BaseException | None) -> None:
    """Close ``stream`` at the end of a ``with`` block that ``error`` left; that error is never masked."""
    try:
        stream.close()
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"besides, work on {stream!r} failed: {late!r}")


def raise_oldest(streams: Iterable[Numbered]) -> None:
    """Raise the kept error of the earliest-made stream that has one."""
    for stream in sorted(streams, key=lambda stream: stream.number):
        stream.errors.raise_kept()


def check_timeout(timeout_s: float | None) -> float | None:
    """Return ``timeout_s`` capped at the platform's maximum, None if there is no bound.

    Raises:
        InvalidInputError: it is negative or not a number.
    """
    if timeout_s is None:
        return None
    if math.isnan(timeout_s) or timeout_s < 0:
        raise InvalidInputError(f"timeout_s is {timeout_s}: give seconds >= 0, or None to wait without bound")
    return min(timeout_s, threading.TIMEOUT_MAX)
