"""Overhead of the serving loop per batch, in microseconds: everything but the work of the batch itself.

Three schedulers over an executor that does nothing, at 1 and 64 requests per batch:

- ``loop``: hands out one and the same batch again and again; the cost of the loop itself.
- ``iterations``: first-come-first-served iterations (ORCA, Algorithm 1); one request in 32 ends and is replaced.
- ``whole requests``: ``ZeroBatch``; every request is submitted, admitted, batched and finished within one batch.

ORCA's schedule has room for less than 1 ms per iteration at batch 1 and 3 % of an iteration at batch 64.

    mlsys bench core-serving-loop rounds=7 batches=2000
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.loop import (
    Finished,
    FinishReason,
    InlineExecutor,
    ServeRequest,
    ServingLoop,
    ThreadExecutor,
    WallClock,
    WorkerId,
)
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_core.profiling import turns

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

ITERATIONS_PER_REQUEST = 32


class _Iterations:
    """First come, first served, one iteration at a time; a request is an id and the iterations it needs."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._remaining: dict[str, int] = {}
        self._waiting: list[str] = []

    def add(self, request: tuple[str, int], now: float) -> None:
        self._remaining[request[0]] = request[1]
        self._waiting.append(request[0])

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Any]]:
        if request_id not in self._waiting:  # in flight, it runs to its end
            return ()
        self._waiting.remove(request_id)
        del self._remaining[request_id]
        return [Finished(request_id, FinishReason.CANCELLED)]

    def next_batch(self, worker: WorkerId, now: float) -> list[str] | None:
        batch, self._waiting = self._waiting[: self._max_batch_size], self._waiting[self._max_batch_size :]
        return batch or None

    def complete(self, batch: list[str], output: list[int], now: float) -> Sequence[Finished[Any]]:
        finished = []
        again = []
        for name, token in zip(batch, output, strict=True):
            self._remaining[name] -= 1
            if self._remaining[name]:
                again.append(name)
            else:
                del self._remaining[name]
                finished.append(Finished(name, FinishReason.DONE, token))
        self._waiting = again + self._waiting  # in order of arrival: those came before all that wait
        return finished

    def fail(self, batch: list[str], error: BaseException, now: float) -> Sequence[Finished[Any]]:
        raise error

    def wake_at(self, now: float) -> float | None:
        return None

    @property
    def num_unfinished(self) -> int:
        return len(self._remaining)


class _Same(_Iterations):
    """A scheduler that hands out one batch for ever."""

    def add(self, request: tuple[str, int], now: float) -> None:
        super().add(request, now)
        self._batch = list(self._remaining)

    def next_batch(self, worker: WorkerId, now: float) -> list[str] | None:
        return self._batch

    def complete(self, batch: list[str], output: list[int], now: float) -> Sequence[Finished[Any]]:
        return ()


class _Resubmit:
    """Keeps the number of requests: submits a new one for each that leaves."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make
        self._next = 0
        self.num_batches = 0
        self.loop: ServingLoop[Any, Any, Any] | None = None

    def submit(self) -> None:
        assert self.loop is not None
        name = str(self._next)
        self._next += 1
        self.loop.submit(self._make(name), name)

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        self.num_batches += 1

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        if finished.reason is FinishReason.DONE:
            self.submit()


def _iterations_of(name: str) -> tuple[str, int]:
    return name, ITERATIONS_PER_REQUEST - int(name) % ITERATIONS_PER_REQUEST  # the first ones do not end all at once


SCHEDULERS: dict[str, tuple[Callable[[int], Any], Callable[[str], Any]]] = {
    "loop": (_Same, _iterations_of),
    "iterations": (_Iterations, _iterations_of),
    "whole requests": (lambda size: ZeroBatch(max_batch_size=size), lambda name: ServeRequest(name, None)),
}


def microseconds_per_batch(scheduler: str, executor: type, batch_size: int, num_batches: int) -> float:
    """Return the mean time of a step of the loop, which is one batch once it is under way."""
    make_scheduler, make_request = SCHEDULERS[scheduler]
    output = [0] * batch_size
    listener = _Resubmit(make_request)
    with ServingLoop[Any, Any, Any](
        make_scheduler(batch_size), executor(lambda _: output), WallClock(), listener=listener
    ) as loop:
        listener.loop = loop
        for _ in range(batch_size):
            listener.submit()
        for _ in range(num_batches // 10):  # warm up
            loop.step()
        num_before = listener.num_batches
        started_s = time.perf_counter()
        for _ in range(num_batches):
            loop.step()
        elapsed_s = time.perf_counter() - started_s
        if listener.num_batches - num_before != num_batches:
            raise SystemExit(f"{scheduler}: {num_batches} steps ran {listener.num_batches - num_before} batches")
    return elapsed_s / num_batches * 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """Time of a batch in the loop, in microseconds."""

    executor: str
    scheduler: str
    batch_size: int
    median_us: float
    min_us: float
    max_us: float


def run(context: BenchContext, *, rounds: int = 7, batches: int = 2000) -> Section:
    """Time ``batches`` batches of each case in each of ``rounds`` rounds."""
    if context.is_quick:
        rounds, batches = 2, 200
    cases = [
        (scheduler, executor, batch_size)
        for executor in (InlineExecutor, ThreadExecutor)
        for scheduler in SCHEDULERS
        for batch_size in (1, 64)
    ]
    times: dict[tuple[str, type, int], list[float]] = {case: [] for case in cases}
    for turn in turns.rounds(cases, num_rounds=rounds):
        for case in turn:
            times[case].append(microseconds_per_batch(*case, batches))
    rows = [
        Row(executor.__name__, scheduler, batch_size, statistics.median(values), min(values), max(values))
        for (scheduler, executor, batch_size), values in times.items()
    ]
    return rows_section("Core: the serving loop", rows, "Microseconds a batch, the batch's own work left out.")
