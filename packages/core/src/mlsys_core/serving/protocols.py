"""The seams of the one serving loop (ORCA: iterations; BatchMaker: cells; DVABatch: stages; see docs/serving-loop.md).

A :class:`Scheduler` is pure: plain data in, batches out, no torch, no clock of its own. An :class:`Executor` owns tensors,
streams and threads. :class:`mlsys_core.serving.loop.ServingLoop` joins them and is the only caller of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, Protocol, TypeVar

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", int)

Request = TypeVar("Request")
Batch = TypeVar("Batch")
Output = TypeVar("Output")
RequestIn = TypeVar("RequestIn", contravariant=True)


class FinishReason(Enum):
    """Why a request left the loop."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed before it was done
    FAILED = "failed"  # its batch failed, or it can never be scheduled


@dataclass(frozen=True, slots=True)
class Finished(Generic[Output]):
    """A request that left the loop; every admitted request yields exactly one."""

    request_id: str
    reason: FinishReason
    result: Output | None = None  # the request's own result, owned by the receiver; None unless DONE
    error: BaseException | None = None  # the cause, if FAILED


class Scheduler(Protocol[Request, Batch, Output]):
    """Decides which work runs next, at the finest grain. All times are seconds of the loop's clock."""

    def add(self, request: Request, now: float) -> None:
        """Admit ``request``. Raises ``ServingError`` if it can never be scheduled; nothing is kept then."""
        ...

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Output]]:
        """Drop a request; unknown or finished ids are ignored. Work in flight for it is discarded at ``complete``.

        Returns the requests that left by it at once; one still in flight leaves from ``complete`` as CANCELLED.
        """
        ...

    def next_batch(self, worker: WorkerId, now: float) -> Batch | None:
        """The next batch for ``worker``, or None if there is nothing to run now."""
        ...

    def complete(self, batch: Batch, output: Output, now: float) -> Sequence[Finished[Output]]:
        """Take the output of a batch handed out before; returns the requests that left the loop by it."""
        ...

    def fail(self, batch: Batch, error: BaseException, now: float) -> Sequence[Finished[Output]]:
        """The executor failed ``batch``; returns the requests that left the loop by it."""
        ...

    def wake_at(self, now: float) -> float | None:
        """When ``next_batch`` may answer differently though nothing arrived or completed (a batching window's end,
        a deadline); None if only events can change it."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        ...


class Executor(Protocol[Batch, Output]):
    """Runs batches. One executor serves one worker; its batches complete in the order submitted."""

    max_in_flight: int  # Orca: number of pipeline stages; BatchMaker: MaxTasksToSubmit; DVABatch: buffer pairs

    def submit(self, batch: Batch) -> None:
        """Start ``batch``; must not block while fewer than ``max_in_flight`` are in flight."""
        ...

    def wait(self, timeout_s: float | None) -> tuple[Batch, Output | BaseException] | None:
        """The oldest completed batch with its output (or what it raised); None after ``timeout_s`` or
        :meth:`interrupt`. ``timeout_s=None`` waits without bound."""
        ...

    def interrupt(self) -> None:
        """Make a :meth:`wait` in progress, or the next one, return soon. Callable from any thread."""
        ...

    def close(self) -> None:
        """Release threads and memory; idempotent."""
        ...


class Clock(Protocol):
    """Time in seconds; ``WallClock`` or ``VirtualClock``."""

    def now(self) -> float: ...
