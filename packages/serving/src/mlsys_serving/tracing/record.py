"""Facts about a traced request, noted where they arise: its front's, and its life in an engine.

All times are seconds of ``time.perf_counter``, which is the clock of serving loops and the same in all processes of a
machine. Facts are written by one thread at a time and read when the request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

Fact = str | int | float | bool
MAX_NOTED_BATCHES = 16  # of a request, one by one; all are in its sums
_MAX_PARTS = 128  # engine requests of one client's request that are traced


@dataclass(frozen=True, slots=True)
class Note:
    """Moment in the life of a request."""

    name: str
    at_s: float
    facts: dict[str, Fact] = field(default_factory=dict)


@dataclass(slots=True)
class EngineTrace:
    """Life of one request in one engine."""

    operation: str  # "generate" or "infer"
    model: str
    submitted_s: float
    started_s: float | None = None  # its first batch began to run
    first_output_s: float | None = None  # its client's front read the first token or part
    ended_s: float | None = None
    reason: str = ""  # why it left; empty: it has not
    num_batches: int = 0  # that it ran in
    num_neighbours: int = 0  # other requests in them, summed over the batches
    max_neighbours: int = 0
    executor_s: float = 0.0  # that those batches ran
    notes: list[Note] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)  # attributes of its span, by their names

    def note_batch(self, num_neighbours: int, started_s: float, ended_s: float) -> None:
        """Note a batch that it ran in."""
        if self.started_s is None:
            self.started_s = started_s
        if self.num_batches < MAX_NOTED_BATCHES:
            facts: dict[str, Fact] = {"mlsys.neighbours": num_neighbours, "mlsys.executor_s": ended_s - started_s}
            self.notes.append(Note("batch", started_s, facts))
        self.num_batches += 1
        self.num_neighbours += num_neighbours
        self.max_neighbours = max(self.max_neighbours, num_neighbours)
        self.executor_s += ended_s - started_s


@dataclass(slots=True)
class RequestTrace:
    """Traced request of a client; the front owns it."""

    parts: list[EngineTrace] = field(default_factory=list)  # one for each choice, row or message
    facts: dict[str, Fact] = field(default_factory=dict)  # attributes of its span, by their names
    num_untraced: int = 0  # parts beyond those
    name: str | None = None  # of its span; None: as it was opened
    is_error: bool = False


# Of the request that a coroutine works for; None: it is not traced.
current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)


class Watcher(Protocol):
    """Hears of all requests of an engine and of its batches, while somebody looks on. From any thread."""

    def opened(self, request_id: str, **facts: Any) -> None:
        """Note that a request was submitted, with what is known of it."""
        ...

    def ran(self, batch: Any, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Note a batch; ids may be empty where ``batch`` says more."""
        ...

    def closed(self, request_id: str, reason: str) -> None:
        """Note that a request has left."""
        ...


class EngineTraces:
    """Traced requests of one engine that have not ended. From any thread.

    Args:
        members: returns the ids of the requests in a batch.
        watcher: hears of all requests and batches: the score's source. None: nobody does.

    Example:
        >>> traces = EngineTraces(lambda batch: batch)
        >>> trace = RequestTrace()
        >>> token = current_trace.set(trace)
        >>> _ = traces.open("a", operation="infer", model="m")
        >>> current_trace.reset(token)
        >>> traces.on_batch(["a", "b"], 1.0, 1.5)
        >>> trace.parts[0].num_neighbours, trace.parts[0].executor_s
        (1, 0.5)
    """

    __slots__ = ("_members", "_running", "watcher")

    def __init__(self, members: Callable[[Any], Sequence[str]], *, watcher: Watcher | None = None) -> None:
        self._members = members
        self._running: dict[str, EngineTrace] = {}
        self.watcher = watcher

    def __bool__(self) -> bool:
        """Return whether any request is traced, or all are watched."""
        return bool(self._running) or self.watcher is not None

    @property
    def has_traced(self) -> bool:
        """True if any request is traced."""
        return bool(self._running)

    def open(self, request_id: str, *, operation: str, model: str, **facts: Any) -> EngineTrace | None:
        """Trace a request from now on if its client's request is traced; call it in that request's context.

        ``facts`` are for who looks on.
        """
        if (watcher := self.watcher) is not None:
            watcher.opened(request_id, **facts)
        request = current_trace.get()
        if request is None or request_id in self._running:
            return None
        if len(request.parts) >= _MAX_PARTS:
            request.num_untraced += 1
            return None
        part = EngineTrace(operation, model, time.perf_counter())
        request.parts.append(part)
        self._running[request_id] = part
        return part

    def on_batch(self, batch: Any, started_s: float, ended_s: float) -> None:
        """Note a batch that ran; before the scheduler hears of its end, which may forget who was in it."""
        watcher = self.watcher
        if not self._running and watcher is None:
            return
        members = self._members(batch)
        if watcher is not None:
            watcher.ran(batch, members, started_s, ended_s)
        if self._running:
            self.note_batch(members, started_s, ended_s)

    def note_batch(self, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Note that these requests ran in one batch."""
        for request_id in request_ids:
            part = self._running.get(request_id)
            if part is not None:
                part.note_batch(len(request_ids) - 1, started_s, ended_s)

    def note(self, request_id: str, name: str, **facts: Fact) -> None:
        """Note that something befell a request now."""
        part = self._running.get(request_id)
        if part is not None:
            part.notes.append(Note(name, time.perf_counter(), facts))

    def close(self, request_id: str, reason: str) -> None:
        """Note that a request has left; ids that are not traced are ignored."""
        if (watcher := self.watcher) is not None:
            watcher.closed(request_id, reason)
        part = self._running.pop(request_id, None)
        if part is not None:
            part.ended_s, part.reason = time.perf_counter(), reason
