"""A recorder of spans, instants and counters cheap enough for a hot loop (figures: docs/profiling.md).

Each thread appends plain tuples to a ring of its own, without a lock. :meth:`Recorder.recording` gathers the rings into
a :class:`~mlsys_core.profiling.recording.Recording`, which ``write_trace`` exports and ``summarise_recording``
condenses.
"""

from __future__ import annotations

import functools
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import at_fork
from mlsys_core.profiling.recording import (
    Anchor,
    Args,
    Instant,
    Process,
    Recording,
    Sample,
    Span,
    Track,
    named_track,
)
from mlsys_core.profiling.spans import (
    NULL_SPAN,
    LocalBuffer,
    RawEvent,
    SpanContext,
    Spanner,
    ThreadBuffer,
)
from mlsys_core.profiling.spans import Span as OpenSpan


class Recorder:
    """Recorder of events in all threads of this process.

    A full buffer drops its oldest events, as the latest ones explain the present. The number dropped is kept and
    exported. After ``os.fork`` the child starts empty, so that no event is reported twice.

    Args:
        enabled: False makes every method do nothing; it cannot be changed later, so that hot loops need no check.
        clock_ns: The clock of all events, in nanoseconds. The default is the same in all processes of a host.
        wall_ns: Nanoseconds since 1970; the recording notes its start in it.
        max_events: Events kept for each thread, some 200 bytes each.
        max_threads: Buffers kept; beyond it the oldest finished thread's events are dropped.
        process: Name of this process in timelines.
        host: Name of this host.

    Raises:
        InvalidInputError: ``max_events`` or ``max_threads`` is below 1.

    Example:
        >>> recorder = Recorder()
        >>> with recorder.span("prefill", request="7", tokens=12):
        ...     recorder.count("queue", 5)
        >>> decode = recorder.spanner("decode")  # bound once, for the hot loop
        >>> for _ in range(2):
        ...     with decode:
        ...         pass
        >>> [span.name for span in recorder.recording().spans]
        ['prefill', 'decode', 'decode']
    """

    def __init__(
        self,
        enabled: bool = True,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        max_events: int = 100_000,
        max_threads: int = 256,
        process: str = "mlsys",
        host: str | None = None,
    ) -> None:
        for name, value in (("max_events", max_events), ("max_threads", max_threads)):
            if value < 1:
                raise InvalidInputError(
                    f"{name}={value}: a recorder keeps at least 1; pass enabled=False to keep nothing"
                )
        self.enabled: Final = enabled
        self.clock_ns: Final = clock_ns
        self._wall_ns = wall_ns
        self._max_events = max_events
        self._max_threads = max_threads
        self._process = Process(os.getpid(), process, platform.node() if host is None else host)
        self._lock = threading.Lock()  # guards the two below; never taken for an event
        self._buffers: list[ThreadBuffer] = []
        self._evicted = 0  # events dropped with whole buffers
        self._local = LocalBuffer(self._register)
        if enabled:
            _watch_forks()
            _recorders.add(self)

    def span(self, name: str, /, *, track: str | None = None, **args: Any) -> SpanContext:
        """Return a span around a ``with`` block, on the calling thread's row or the named ``track``.

        Exceptions pass through and leave their type's name as ``error`` in the arguments.
        """
        if not self.enabled:
            return NULL_SPAN
        return OpenSpan(self._local, self.clock_ns, name, track, args)

    def spanner(self, name: str, /, *, track: str | None = None, **args: Any) -> SpanContext:
        """Return a span to be bound once and entered often: the form for hot loops. No ``await`` inside."""
        if not self.enabled:
            return NULL_SPAN
        return Spanner(self._local, self.clock_ns, name, track, args)

    def complete(self, name: str, /, start_ns: int, end_ns: int, *, track: str | None = None, **args: Any) -> None:
        """Record a span measured elsewhere (a request's life across tasks), in nanoseconds of ``clock_ns``.

        Raises:
            InvalidInputError: it ends before it starts.
        """
        if not self.enabled:
            return
        if end_ns < start_ns:
            raise InvalidInputError(f"span {name!r} ends at {end_ns} ns, before its start at {start_ns} ns")
        self._local.buffer.add("X", name, start_ns, end_ns, track, args)

    def instant(self, name: str, /, *, track: str | None = None, **args: Any) -> None:
        """Record an event at this moment."""
        if not self.enabled:
            return
        self._local.buffer.add("i", name, self.clock_ns(), None, track, args)

    def count(self, name: str, value: float, /) -> None:
        """Record that the counter ``name`` of this process has ``value`` from now on."""
        if not self.enabled:
            return
        buffer = self._local.buffer
        buffer.events.append((buffer.next_number(), "C", name, self.clock_ns(), value, None, False))

    def recording(self, *, clear: bool = False) -> Recording:
        """Return all events recorded; spans still open are not in it.

        Args:
            clear: Forget the returned events, so that each is returned once.
        """
        with self._lock:
            own = self._own_recording(clear)
            if clear:
                self._evicted = 0
        return own

    def _anchor(self) -> Anchor:
        return Anchor(self.clock_ns(), self._wall_ns())

    def _register(self) -> ThreadBuffer:
        buffer = ThreadBuffer(self._max_events)
        with self._lock:
            self._buffers.append(buffer)
            finished = [other for other in self._buffers if not other.thread.is_alive()]
            if len(self._buffers) > self._max_threads and finished:
                self._buffers.remove(finished[0])
                events, dropped = finished[0].take()
                self._evicted += len(events) + dropped
        return buffer

    def _own_recording(self, clear: bool) -> Recording:
        pid = self._process.pid
        dropped = self._evicted
        events: list[tuple[RawEvent, Args | None, Track]] = []
        running = [buffer for buffer in self._buffers if buffer.thread.is_alive()]  # asked first: may finish any time
        for buffer in self._buffers:
            thread = Track(pid, buffer.tid, buffer.thread.name)
            raw, lost = buffer.take() if clear else buffer.snapshot()
            dropped += lost
            for event, args in raw:
                events.append((event, args, thread if event[5] is None else named_track(pid, event[5])))
        if clear:
            self._buffers = running
        spans = [(Span(e[2], e[3], e[4], track, args), e[0]) for e, args, track in events if e[1] == "X"]
        spans.sort(key=lambda item: (item[0].start_ns, -item[0].end_ns, -item[1]))  # the outer of equals leaves later
        instants = [Instant(e[2], e[3], track, args) for e, args, track in events if e[1] == "i"]
        samples = [Sample(e[2], e[3], e[4], pid) for e, _, _ in events if e[1] == "C"]
        return Recording(
            processes=(self._process,),
            spans=tuple(span for span, _ in spans),
            instants=tuple(sorted(instants, key=lambda instant: instant.at_ns)),
            samples=tuple(sorted(samples, key=lambda sample: sample.at_ns)),
            dropped=dropped,
            anchor=self._anchor(),
        )

    def reset_in_fork(self) -> None:
        """Forget everything; called in a child just forked, as the parent reports the events in the buffers."""
        self._lock = threading.Lock()  # another thread may have held it
        self._process = self._process._replace(pid=os.getpid())
        self._evicted = 0
        self._buffers = [buffer for buffer in self._buffers if buffer.thread is threading.current_thread()]
        for buffer in self._buffers:
            buffer.take()
            buffer.tid = threading.get_native_id()


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()  # those to be emptied in forked children


def _reset_all() -> None:
    for recorder in _recorders:
        recorder.reset_in_fork()


@functools.cache
def _watch_forks() -> None:
    at_fork(in_child=_reset_all)


NULL_RECORDER = Recorder(enabled=False)
"""Records nothing: the default of whatever takes a recorder."""
