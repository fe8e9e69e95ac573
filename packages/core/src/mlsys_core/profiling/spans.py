"""The context managers of the recorder, and the buffer of one thread they append to. This is the hot path.

A buffer holds plain tuples, each preceded by its arguments' dict if it has any;
:mod:`mlsys_core.profiling.recorder` turns them into a :class:`~mlsys_core.profiling.recording.Recording` later.

The dict is not in the tuple, because the garbage collector stops visiting a tuple only if it holds no container but
other such tuples. A hundred thousand tuples for every full collection to visit would cost more than the recording.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

Kind = Literal["X", "i", "C"]  # span, instant, counter
# number, kind, name, start_ns, end (a span's end in ns, a counter's value, None), named track, has arguments
RawEvent = tuple[int, Kind, str, int, Any, str | None, bool]


class SpanContext(Protocol):
    """A span to enter and leave around the work; made by ``Recorder.span`` and ``Recorder.spanner``."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def note(self, **args: Any) -> None:
        """Add arguments known only inside the span. On a spanner they hold for the whole spanner: use ``span``."""
        ...


class ThreadBuffer:
    """The newest events of the calling thread: a ring without a lock, as only its thread appends."""

    __slots__ = ("events", "expected", "max_events", "next_number", "starts", "thread", "tid")

    def __init__(self, max_events: int) -> None:
        self.max_events = max_events
        self.events: deque[RawEvent | dict[str, Any]] = deque(maxlen=2 * max_events)  # enough if all have arguments
        self.next_number: Callable[[], int] = itertools.count().__next__  # gaps in the numbers tell what was dropped
        self.expected = 0  # number of the first event not yet taken
        self.starts: list[int] = []  # start times of the open spans of spanners, innermost last
        self.thread = threading.current_thread()
        self.tid = threading.get_native_id()

    def add(self, kind: Kind, name: str, start_ns: int, end: Any, track: str | None, args: dict[str, Any]) -> None:
        """Append an event. Spans do the same in line, to save the call."""
        event = (self.next_number(), kind, name, start_ns, end, track, bool(args))
        if args:
            self.events.append(args)
        self.events.append(event)

    def snapshot(self) -> tuple[list[tuple[RawEvent, dict[str, Any] | None]], int]:
        """Return the kept events, each with its arguments, and the number dropped before them."""
        return self._pair(self.events.copy())  # one C call: its thread may go on appending

    def take(self) -> tuple[list[tuple[RawEvent, dict[str, Any] | None]], int]:
        """Return the events like :meth:`snapshot`, and forget them."""
        items = [self.events.popleft() for _ in range(len(self.events))]
        if items and isinstance(items[-1], dict):  # its thread is about to append the event
            self.events.appendleft(items.pop())
        events, dropped = self._pair(items)
        if events:
            self.expected = events[-1][0][0] + 1
        return events, dropped

    def _pair(
        self, items: Iterable[RawEvent | dict[str, Any]]
    ) -> tuple[list[tuple[RawEvent, dict[str, Any] | None]], int]:
        events: list[tuple[RawEvent, dict[str, Any] | None]] = []
        args: dict[str, Any] | None = None
        for item in items:
            if isinstance(item, dict):
                args = item
            elif item[6]:
                events.append((item, args))
                args = None
            else:
                events.append((item, None))
        events = events[-self.max_events :]
        return events, (events[-1][0][0] + 1 - self.expected - len(events) if events else 0)


class LocalBuffer(threading.local):
    """``.buffer`` is the calling thread's buffer, made by ``register`` at the thread's first event."""

    def __init__(self, register: Callable[[], ThreadBuffer]) -> None:
        self.buffer = register()


class Span:
    """One span, from ``with recorder.span(...)``. It holds its own start, so the block may ``await``."""

    __slots__ = ("_args", "_clock_ns", "_local", "_name", "_start_ns", "_track")

    def __init__(
        self, local: LocalBuffer, clock_ns: Callable[[], int], name: str, track: str | None, args: dict[str, Any]
    ) -> None:
        self._local = local
        self._clock_ns = clock_ns
        self._name = name
        self._track = track
        self._args = args

    def __enter__(self) -> Self:
        self._start_ns = self._clock_ns()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        end_ns = self._clock_ns()
        args = self._args
        if error_type is not None:
            args["error"] = error_type.__name__
        buffer = self._local.buffer
        event: RawEvent = (buffer.next_number(), "X", self._name, self._start_ns, end_ns, self._track, bool(args))
        if args:
            buffer.events.append(args)
        buffer.events.append(event)

    def note(self, **args: Any) -> None:
        """Add arguments known only inside the span."""
        self._args.update(args)


class Spanner(Span):
    """A span bound once and entered many times, from any thread, also within itself.

    Its open spans live on a stack of their thread, so the block must not ``await`` or ``yield`` to other users of that
    thread: use ``Recorder.span`` there.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        self._local.buffer.starts.append(self._clock_ns())
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        end_ns = self._clock_ns()
        buffer = self._local.buffer
        args = self._args
        if error_type is not None:
            args = {**args, "error": error_type.__name__}
        event: RawEvent = (buffer.next_number(), "X", self._name, buffer.starts.pop(), end_ns, self._track, bool(args))
        if args:
            buffer.events.append(args)
        buffer.events.append(event)

    def note(self, **args: Any) -> None:
        """Set arguments for all later spans of this spanner."""
        self._args = {**self._args, **args}


class NullSpan:
    """The span of a disabled recorder: does nothing, at the cost of two calls into C.

    ``with`` looks both methods up on the class and calls them. Python functions there cost some 75 ns together; these
    two built-in methods, which are no descriptors and so get no ``self``, half of that.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

        def __exit__(
            self,
            error_type: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
            /,
        ) -> None: ...

    def note(self, **args: Any) -> None:
        """Ignore the arguments."""


NULL_SPAN = NullSpan()
# Returns NULL_SPAN, as nothing else can reach this variable to set it.
NullSpan.__enter__ = ContextVar("null_span", default=NULL_SPAN).get  # type: ignore[method-assign, assignment]
# Takes anything, returns None. A memoryview may be released any number of times (documented), which is all it does.
NullSpan.__exit__ = memoryview(b"").__exit__  # type: ignore[method-assign, assignment]
