"""Interfaces of the one serving loop (ORCA: iterations; BatchMaker: cells; DVABatch: stages; docs/serving-loop.md).

A :class:`Scheduler` is pure: plain data in, batches out, no torch, no clock of its own. An :class:`Executor` owns
tensors, streams and threads. :class:`mlsys_core.loop.ServingLoop` joins them and is the only caller of both.
:class:`Expiring` and :class:`Draining` are optional abilities of a scheduler; the loop asks for them once, at its
start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NewType, Protocol, TypeVar, runtime_checkable

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", int)

Request = TypeVar("Request")
Batch = TypeVar("Batch")
Output = TypeVar("Output")
RequestIn = TypeVar("RequestIn", contravariant=True)
BatchIn = TypeVar("BatchIn", contravariant=True)
OutputIn = TypeVar("OutputIn", contravariant=True)
OutputOut = TypeVar("OutputOut", covariant=True)
Result = TypeVar("Result", covariant=True)


class FinishReason(Enum):
    """Reason why a request left the loop."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed before it was done
    FAILED = "failed"  # its batch failed, or it can never be scheduled


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """A request that left the loop; every admitted request yields exactly one."""

    request_id: str
    reason: FinishReason
    result: Result | None = None  # the request's own result, owned by the receiver; None unless DONE
    error: BaseException | None = None  # the cause, if FAILED


class Scheduler(Protocol[RequestIn, Batch, OutputIn]):
    """Decides which work runs next, at the finest grain. All times are seconds of the loop's clock, never backwards.

    An exception from here, except a refusal by :meth:`add`, is a defect: the loop then fails every unfinished request
    with it, stops, and re-raises.
    """

    def add(self, request: RequestIn, now: float) -> None:
        """Admit ``request``.

        Raises ``ServingError`` (any ``MlsysError``) if it can never be scheduled or there is no room for it; nothing is
        kept then, and the loop reports it as FAILED.
        """
        ...

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Any]]:
        """Drop a request; unknown or finished ids are ignored. Work in flight for it is discarded at ``complete``.

        Returns the requests that left by it at once; one still in flight leaves from ``complete`` as CANCELLED.
        """
        ...

    def next_batch(self, worker: WorkerId, now: float) -> Batch | None:
        """Return the next batch for ``worker``, or None if there is nothing to run now.

        Asked only while ``worker`` has fewer than ``max_in_flight`` batches, the least loaded worker first, and again
        until it answers None. A batch handed out comes back exactly once, through ``complete`` or ``fail``, unless the
        loop stops before.
        """
        ...

    def complete(self, batch: Batch, output: OutputIn, now: float) -> Sequence[Finished[Any]]:
        """Take the output of a batch handed out before; return the requests that left the loop by it."""
        ...

    def fail(self, batch: Batch, error: BaseException, now: float) -> Sequence[Finished[Any]]:
        """Take the failure of ``batch``; return the requests that left the loop by it.

        A scheduler may retry the requests instead; it must bound its retries.
        """
        ...

    def wake_at(self, now: float) -> float | None:
        """Return the next time at which ``next_batch`` or ``expire`` may change its answer; None if only events do.

        Examples: a batching window's end, a deadline. Asked right after ``next_batch``, so only times after ``now``
        count; others are read as None.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests admitted that have not left."""
        ...


@runtime_checkable
class Expiring(Protocol):
    """A scheduler whose requests may have deadlines."""

    def expire(self, now: float) -> Sequence[Finished[Any]]:
        """Return the requests that leave at ``now`` as EXPIRED, at their deadlines; called in every step."""
        ...


@runtime_checkable
class Draining(Protocol):
    """A scheduler that waits for more requests to come (for a full batch, for a window's end)."""

    def drain(self, now: float) -> None:
        """Accept that no request will be added any more: run waiting requests without waiting for others."""
        ...


class Executor(Protocol[Batch, OutputOut]):
    """Runs batches. One executor serves one worker; its batches complete in the order submitted.

    A batch's exception is its output. An exception *out of* ``submit`` or ``wait``, or a batch out of order, means
    that the executor itself is lost: the loop fails its batches in flight and goes on with the other workers.
    """

    @property
    def max_in_flight(self) -> int:
        """Number of batches it takes before the first has completed, at least 1, constant.

        Orca: number of pipeline stages; BatchMaker: MaxTasksToSubmit; DVABatch: buffer pairs.
        """
        ...

    def submit(self, batch: Batch) -> None:
        """Start ``batch``; must not block while fewer than ``max_in_flight`` are in flight."""
        ...

    def wait(self, timeout_s: float | None) -> tuple[Batch, OutputOut | BaseException] | None:
        """Return the oldest completed batch with its output or exception; None at the timeout or when interrupted.

        ``timeout_s=None`` waits without bound.
        """
        ...

    def interrupt(self) -> None:
        """Make a :meth:`wait` in progress, or the next one, return soon. Callable from any thread."""
        ...

    def close(self) -> None:
        """Release threads and memory; idempotent. Batches in flight may be dropped."""
        ...


class Listener(Protocol[BatchIn, OutputIn]):
    """Hears of outputs and finished requests, in the loop's thread: be quick, or hand over to a queue.

    May call ``submit`` and ``cancel`` of the loop. Its exceptions are logged and otherwise ignored.
    """

    def on_output(self, batch: BatchIn, output: OutputIn, now: float) -> None:
        """Handle ``output`` of ``batch``, already seen by the scheduler; stream partial results here."""
        ...

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Handle a request that left; called once per request, after its last ``on_output``."""
        ...


class LoopRecorder(Protocol):
    """The part of ``mlsys_core.profiling.Recorder`` that the loop needs; its clock must be the loop's (nanoseconds)."""

    def complete(self, name: str, start_ns: int, end_ns: int, /, *, track: str | None = None) -> None:
        """Record a span that was measured by the caller."""
        ...

    def count(self, name: str, value: float, /) -> None:
        """Record the value that a counter has from now on."""
        ...


class BatchTraces(Protocol):
    """Traces of requests, as the loop sees them; ``mlsys_serving.tracing.EngineTraces`` is one."""

    def __bool__(self) -> bool:
        """Return whether batches are to be noted at all."""
        ...

    def on_batch(self, batch: Any, started_s: float, ended_s: float) -> None:
        """Note a batch that ran, in seconds of the loop's clock; before the scheduler hears of its end."""
        ...


class Clock(Protocol):
    """Time in seconds; ``WallClock`` or ``VirtualClock``."""

    def now(self) -> float:
        """Return the seconds since a fixed but arbitrary moment, never less than before."""
        ...
