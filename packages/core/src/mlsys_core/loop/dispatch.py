"""Dispatch of batches from the scheduler to the executors, and of outcomes to the listener, in the loop's thread only.

:class:`~mlsys_core.loop.serving_loop.ServingLoop` is the outer half: requests, threads, the end.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

from mlsys_core.errors import ServingError
from mlsys_core.loop.many_workers import workers_of
from mlsys_core.loop.protocols import (
    Batch,
    BatchIn,
    BatchTraces,
    Clock,
    Executor,
    Finished,
    Listener,
    LoopRecorder,
    Output,
    OutputIn,
    Request,
    Scheduler,
    WorkerId,
)
from mlsys_core.loop.workers import Completion, Lost

_logger = logging.getLogger(__name__)


class Collector(Generic[BatchIn, OutputIn]):
    """Keeps every finished request: for tests and scripts; a server would grow without bound.

    Example:
        >>> from mlsys_core.loop.protocols import FinishReason
        >>> collector = Collector()
        >>> collector.on_finished(Finished("a", FinishReason.DONE, 7), now=0.5)
        >>> collector.finished["a"].result, collector.finished_s["a"]
        (7, 0.5)
    """

    def __init__(self) -> None:
        self.finished: dict[str, Finished[Any]] = {}  # by request id, in order of leaving
        self.finished_s: dict[str, float] = {}  # when, seconds of the loop's clock
        self.num_outputs = 0  # batches that gave an output

    def on_output(self, batch: BatchIn, output: OutputIn, now: float) -> None:
        """Count the output."""
        self.num_outputs += 1

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Keep the finished request and its time."""
        self.finished[finished.request_id] = finished
        self.finished_s[finished.request_id] = now


class Guarded(Generic[BatchIn, OutputIn]):
    """Passes everything on to a listener, if there is one; the listener's exceptions are logged and go no further."""

    def __init__(self, listener: Listener[BatchIn, OutputIn] | None) -> None:
        self._listener = listener

    def on_output(self, batch: BatchIn, output: OutputIn, now: float) -> None:
        """Pass the output on."""
        if self._listener is not None:
            try:
                self._listener.on_output(batch, output, now)
            except (Exception, SystemExit):
                _logger.exception("the listener raised in on_output; the loop goes on")

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Pass the finished request on."""
        if self._listener is not None:
            try:
                self._listener.on_finished(finished, now)
            except (Exception, SystemExit):
                _logger.exception("the listener raised in on_finished of %r; the loop goes on", finished.request_id)


class InFlight(Generic[Batch, Output]):
    """Batches in flight on one worker's executor."""

    __slots__ = ("_idle_since_s", "_num_taken", "_tracks", "batches", "executor", "max_in_flight", "worker")

    def __init__(self, worker: WorkerId, executor: Executor[Batch, Output]) -> None:
        self.worker = worker
        self.executor = executor
        self.max_in_flight = executor.max_in_flight
        self.batches: deque[tuple[Batch, float]] = deque()  # oldest first, with the time of submission in seconds
        self._num_taken = 0
        self._idle_since_s = 0.0  # when the batch before the oldest had finished
        # Spans of one track must nest or follow each other, so batches that overlap get a track per slot.
        slots = [""] if self.max_in_flight == 1 else [f".{slot}" for slot in range(self.max_in_flight)]
        self._tracks = [f"worker {worker}{slot}" for slot in slots]

    def take(self, batch: Batch, now: float, recorder: LoopRecorder | None, traces: BatchTraces | None = None) -> bool:
        """Take back ``batch``, finished at ``now``; return False if it is not the oldest."""
        if not self.batches or self.batches[0][0] is not batch:
            return False
        _, submitted_s = self.batches.popleft()
        if recorder is not None:
            track = self._tracks[self._num_taken % len(self._tracks)]
            recorder.complete("batch", round(submitted_s * 1e9), round(now * 1e9), track=track)
        if traces is not None:
            if traces:
                traces.on_batch(batch, max(submitted_s, self._idle_since_s), now)
            self._idle_since_s = now
        self._num_taken += 1
        return True


class Dispatcher(Generic[Request, Batch, Output]):
    """Keeps the workers filled with batches of one scheduler, and reports their outcomes.

    Args:
        scheduler: gives batches and is updated with their outcome.
        executors: one per worker.
        clock: read once per completion.
        recorder: gets a span per batch, or None.
        traces: of the requests, which note each batch that they ran in; None: there are none.
        on_output: called with each batch, its output and the time, after ``scheduler.complete``.
        on_finished: called with the requests that left and the time.

    Raises:
        InvalidInputError: there is no executor, or the executors do not go together.
    """

    def __init__(
        self,
        scheduler: Scheduler[Request, Batch, Output],
        executors: Sequence[Executor[Batch, Output]],
        *,
        clock: Clock,
        recorder: LoopRecorder | None,
        traces: BatchTraces | None = None,
        on_output: Callable[[Batch, Output, float], None],
        on_finished: Callable[[Sequence[Finished[Any]], float], None],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._recorder = recorder
        self._traces = traces
        self._on_output = on_output
        self._on_finished = on_finished
        self._all = workers_of(executors, clock)
        self._workers = {WorkerId(i): InFlight(WorkerId(i), executor) for i, executor in enumerate(executors)}
        self.interrupt = self._all.interrupt
        self.close = self._all.close

    @property
    def num_in_flight(self) -> int:
        """Number of batches handed to executors and not yet returned."""
        return sum(len(worker.batches) for worker in self._workers.values())

    def fill(self, now: float) -> int:
        """Give batches to every worker that has room, the least loaded first; return their number."""
        num_submitted = 0
        hungry = [
            (len(worker.batches), index, worker)
            for index, worker in enumerate(self._workers.values())
            if len(worker.batches) < worker.max_in_flight
        ]
        heapq.heapify(hungry)  # simulations have a thousand workers
        while hungry:
            _, index, worker = hungry[0]
            batch = self._scheduler.next_batch(worker.worker, now)
            if batch is None:
                heapq.heappop(hungry)
                continue
            worker.batches.append((batch, now))
            num_submitted += 1
            try:
                worker.executor.submit(batch)
            except Exception as error:  # noqa: BLE001 - an executor that dies must not take the loop with it
                self._lose(worker, error, now)
                return num_submitted + self.fill(now)  # afresh: the scheduler may give its work to the others
            if len(worker.batches) == worker.max_in_flight:
                heapq.heappop(hungry)
            else:
                heapq.heapreplace(hungry, (len(worker.batches), index, worker))
        return num_submitted

    def wait(self, now: float, until_s: float | None) -> Completion[Batch, Output] | Lost | None:
        """Wait for the next completion; None when interrupted, at ``until_s``, or at the scheduler's ``wake_at``."""
        wake_s = self._scheduler.wake_at(now)
        if wake_s is not None and wake_s > now and (until_s is None or wake_s < until_s):
            until_s = wake_s
        return self._all.wait(until_s)

    def update_from_output(self, done: Completion[Batch, Output] | Lost) -> Callable[[], None]:
        """Report a batch's outcome to the scheduler.

        Returns:
            A function that tells the callbacks; call it after the worker has been given its next batch.

        Raises:
            ServingError: the last executor is lost.
        """
        worker = self._workers.get(done.worker)
        if worker is None:  # a late word of a lost executor, whose batches were failed
            return _nothing
        now = self._clock.now()
        if isinstance(done, Lost):
            self._lose(worker, done.error, now)
            return _nothing
        if not worker.take(done.batch, now, self._recorder, self._traces):
            self._lose(worker, ServingError("it returned a batch that was not its oldest in flight"), now)
            return _nothing
        batch, output = done.batch, done.output
        if isinstance(output, BaseException):
            failed = self._scheduler.fail(batch, output, now)
            return lambda: self._on_finished(failed, now)
        finished = self._scheduler.complete(batch, output, now)

        def tell() -> None:
            self._on_output(batch, output, now)
            self._on_finished(finished, now)

        return tell

    def _lose(self, worker: InFlight[Batch, Output], error: Exception, now: float) -> None:
        _logger.error("the executor of worker %d is lost: %r", worker.worker, error)
        del self._workers[worker.worker]
        for batch, _ in worker.batches:
            self._on_finished(self._scheduler.fail(batch, error, now), now)
        if not self._workers:
            raise ServingError(f"no executor is left to serve with; the last was lost by {error!r}") from error


def _nothing() -> None:
    """Do nothing: there is no news for the callbacks."""
