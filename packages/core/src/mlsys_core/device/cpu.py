"""The CPU as a device: each stream is one worker thread that takes its work from a queue.

A worker that runs dry spins for a bounded time, since work often follows within microseconds and waking a blocked
thread costs tens of them, and then blocks: an idle stream uses no processor. Spinning gives up the interpreter lock at
each turn.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from mlsys_core.device.limits import memory_now
from mlsys_core.device.protocols import (
    DeviceTimeoutError,
    ErrorLatch,
    Event,
    MemoryInfo,
    check_timeout,
    close_after,
    raise_oldest,
)
from mlsys_core.errors import DeviceError, InvalidInputError
from mlsys_core.posix.machine import allowed_cores, run_on_core

# time.sleep(0) is no substitute on Linux: it sleeps for the timer's slack, some 50 microseconds.
_yield_processor: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def spin_until(condition: Callable[[], bool], spin_s: float) -> bool:
    """Try ``condition`` for at most ``spin_s`` seconds; return whether it became true."""
    if condition():
        return True
    end = time.perf_counter() + spin_s
    while time.perf_counter() < end:
        _yield_processor()
        if condition():
            return True
    return False


class Mark:
    """One recording of an event: closed until the stream's worker passes it, then open for good."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.passed_at: float | None = None  # seconds on ``clock``; stays None without one
        self._clock = clock
        self._is_passed = False
        self._gate = threading.Lock()  # far cheaper than threading.Event, and many marks are never waited for
        self._gate.acquire()

    def is_passed(self) -> bool:
        """Return whether the stream's worker has passed it."""
        return self._is_passed

    def pass_(self) -> None:
        """Open it for good."""
        if self._clock is not None:
            self.passed_at = self._clock()
        self._is_passed = True
        self._gate.release()

    def wait(self, spin_s: float, timeout_s: float | None = None) -> bool:
        """Block until passed; returns False if ``timeout_s`` seconds passed first."""
        if spin_until(self.is_passed, spin_s if timeout_s is None else min(spin_s, timeout_s)):
            return True
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return self._is_passed
        self._gate.release()  # let the next one through
        return True


DEFAULT_SPIN_S = 30e-6  # about what waking a blocked thread costs: spinning longer can waste more than it saves

_Item = tuple[bool, Callable[..., object], tuple[object, ...]]  # (runs even after an error, function, arguments)


class _Worker:
    """The thread's side of a stream. It holds no reference to the stream, so an unused stream can be collected."""

    def __init__(self, spin_s: float) -> None:
        self.queue: SimpleQueue[_Item | None] = SimpleQueue()  # None: stop
        self.errors = ErrorLatch()
        self._spin_s = spin_s

    def run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one item in a frame of its own, so that an idle worker keeps no arguments of past work alive."""
        spin_until(self._has_work, self._spin_s)
        item = self.queue.get()
        if item is None:
            return False
        runs_always, fn, args = item
        if runs_always:
            fn(*args)
        elif not self.errors.is_set:
            try:
                fn(*args)
            except BaseException as error:  # noqa: BLE001 - the work's own; synchronize() and close() raise it
                self.errors.keep(error)
        return True

    def _has_work(self) -> bool:
        return not self.queue.empty()


class CpuEvent:
    """An event of a :class:`CpuDevice`; see :class:`~mlsys_core.device.protocols.Event`."""

    def __init__(self, *, timing: bool, clock: Callable[[], float], spin_s: float) -> None:
        self.timing = timing
        self._clock = clock if timing else None
        self._spin_s = spin_s
        self._mark: Mark | None = None  # the latest recording

    def query(self) -> bool:
        """Return whether the work before the latest recording is done; True if there is none."""
        mark = self._mark
        return mark is None or mark.is_passed()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until :meth:`query` is True; raise :class:`DeviceTimeoutError` after ``timeout_s`` seconds."""
        timeout_s = check_timeout(timeout_s)
        mark = self._mark
        if mark is not None and not mark.wait(self._spin_s, timeout_s):
            raise DeviceTimeoutError(f"the event was not passed within {timeout_s} s; its stream is still at work")

    def elapsed_ms(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``; both need timing and must have been passed."""
        return (_cpu_event(end)._passed_at("the end event") - self._passed_at("the start event")) * 1e3

    def _passed_at(self, which: str) -> float:
        mark = self._mark
        if not self.timing:
            raise DeviceError(f"{which} has no timing: make it with device.event(timing=True)")
        if mark is None:
            raise DeviceError(f"{which} was never recorded: call stream.record(event) first")
        if mark.passed_at is None:
            raise DeviceError(f"{which} has not been passed yet: call its synchronize() first")
        return mark.passed_at

    def _record(self) -> Mark:
        self._mark = mark = Mark(self._clock)
        return mark


def _cpu_event(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise InvalidInputError(
            f"got a {type(event).__name__} where a CPU event is needed: make it with the event() of a cpu device"
        )
    return event


class CpuStream:
    """A worker thread and its queue; see :class:`~mlsys_core.device.protocols.Stream`. Made by :class:`CpuDevice`.

    A stream that is dropped without :meth:`close` finishes its work and its thread ends, but its errors are lost.
    """

    def __init__(self, number: int, *, core: int | None, spin_s: float, name: str | None = None) -> None:
        self.number = number  # streams of a device count from 0, in the order made
        self.core = core  # the one core its thread runs on, or None
        worker = _Worker(spin_s)
        self.errors = worker.errors
        self._spin_s = spin_s
        self._queue = worker.queue
        self._lock = threading.Lock()  # orders submitting, recording and closing by several threads
        self._closed = False
        self._thread = threading.Thread(target=worker.run, name=name or f"mlsys-cpu-stream-{number}", daemon=True)
        self._thread.start()
        weakref.finalize(self, worker.queue.put, None)
        if core is not None and self._thread.native_id is not None:
            run_on_core(self._thread.native_id, core)

    def __repr__(self) -> str:
        return f"<CpuStream {self.number}{'' if self.core is None else f' on core {self.core}'}>"

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        """Enqueue ``fn(*args)`` for the worker thread."""
        with self._lock:
            self._enqueue((False, fn, args))

    def record(self, event: Event) -> None:
        """Let ``event`` stand for all work submitted so far."""
        event = _cpu_event(event)
        with self._lock:
            self._check_open()
            self._enqueue((True, event._record().pass_, ()))

    def wait(self, event: Event) -> None:
        """Hold later work until ``event``, as recorded now, is passed."""
        mark = _cpu_event(event)._mark
        with self._lock:
            self._check_open()
            if mark is not None and not mark.is_passed():
                self._enqueue((True, mark.wait, (self._spin_s,)))

    def synchronize(self) -> None:
        """Block until the work submitted so far is done, then raise the first error it raised, once."""
        self.drain()
        self.errors.raise_kept()

    def drain(self) -> None:
        """Block until the work submitted so far is done; its errors stay kept."""
        self._refuse_own_thread()
        mark = Mark(None)
        with self._lock:
            if self._closed:
                return
            if not self._thread.is_alive():
                raise DeviceError(
                    f"the thread of {self!r} is gone (a fork?): make streams in the process that uses them"
                )
            self._enqueue((True, mark.pass_, ()))
        mark.wait(self._spin_s)

    def close(self) -> None:
        """Drain the stream, end the thread, and raise an error not yet reported."""
        self._refuse_own_thread()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()
        self.errors.raise_kept()

    def leave(self, timeout_s: float) -> None:
        """Refuse new work and wait at most ``timeout_s`` seconds for the rest; the stream's own thread never waits."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if threading.get_ident() != self._thread.ident:
            self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_after(self, error)

    def _enqueue(self, item: _Item) -> None:
        self._check_open()
        self._queue.put(item)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self!r} is closed: make another with device.stream()")

    def _refuse_own_thread(self) -> None:
        if threading.get_ident() == self._thread.ident:
            raise DeviceError(
                f"work on {self!r} must not synchronize or close its own stream: it would wait for itself"
            )


class CpuDevice:
    """The processor, with worker threads as streams; see :class:`~mlsys_core.device.protocols.Device`.

    Args:
        index: 0; there is one.
        spin_s: how long (seconds) a worker or a caller spins before it blocks. 0 never spins: right where others need
            the cores more than this work needs the microseconds.
        clock: seconds, for events with timing.

    Raises:
        InvalidInputError: ``index`` is not 0, or ``spin_s`` is negative or not finite.

    Example:
        >>> device, results = CpuDevice(), []
        >>> with device.stream() as first, device.stream() as second:
        ...     first.submit(results.append, 1)
        ...     done = device.event()
        ...     first.record(done)
        ...     second.wait(done)
        ...     second.submit(results.append, 2)
        >>> results
        [1, 2]
    """

    kind = "cpu"

    def __init__(
        self, index: int = 0, *, spin_s: float = DEFAULT_SPIN_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if index != 0:
            raise InvalidInputError(f"cpu:{index} does not exist: the one CPU device is 'cpu' or 'cpu:0'")
        if not (math.isfinite(spin_s) and spin_s >= 0):
            raise InvalidInputError(f"spin_s is {spin_s}: give seconds >= 0 (0 blocks at once)")
        self.index = index
        self._spin_s = spin_s
        self._clock = clock
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the set: a WeakSet must not grow while another thread walks it
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<CpuDevice {self.name}>"

    @property
    def name(self) -> str:
        """``"cpu:0"``."""
        return f"{self.kind}:{self.index}"

    @property
    def torch_name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    def stream(self, *, core: int | None = None, name: str | None = None) -> CpuStream:
        """Return a new stream called ``name``, with its thread pinned to core number ``core`` if the platform can.

        Raises:
            InvalidInputError: this process may not use that core.
        """
        allowed = allowed_cores()
        if core is not None and allowed is not None and core not in allowed:
            raise InvalidInputError(f"core {core} is not open to this process: allowed are {sorted(allowed)}")
        stream = CpuStream(next(self._numbers), core=core if allowed else None, spin_s=self._spin_s, name=name)
        with self._lock:
            self._streams.add(stream)
        return stream

    def event(self, *, timing: bool = False) -> CpuEvent:
        """Return a new event, not recorded."""
        return CpuEvent(timing=timing, clock=self._clock, spin_s=self._spin_s)

    def synchronize(self) -> None:
        """Block until all streams of this object are idle, then raise the oldest stream's kept error, if any."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.drain()
        raise_oldest(streams)

    def memory_info(self) -> MemoryInfo:
        """Return the machine's memory, or the container's where that is less."""
        return memory_now()
