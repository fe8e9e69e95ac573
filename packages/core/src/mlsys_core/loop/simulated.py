"""Simulation with the serving loop and scheduler themselves: virtual time, and executors that only model durations.

Discrete events: nothing happens between the completions, arrivals and ``wake_at`` times, so the clock jumps from one
to the next. At one and the same time a completion is reported first, then arrivals are admitted, then workers are
filled; at equal times workers go by number.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Generic

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.clock import VirtualClock
from mlsys_core.loop.inbox import LoopState
from mlsys_core.loop.inline import require_in_flight
from mlsys_core.loop.protocols import (
    Batch,
    Clock,
    Finished,
    Listener,
    LoopRecorder,
    Output,
    Request,
    Scheduler,
    WorkerId,
)
from mlsys_core.loop.serving_loop import ServingLoop
from mlsys_core.loop.workers import Completion, Workers


@dataclass(frozen=True, slots=True)
class SimulatedRun(Generic[Batch]):
    """One batch on one simulated worker. Times are seconds of the virtual clock."""

    number: int  # order of submission over all workers, from 0
    worker: WorkerId
    batch: Batch
    submitted_s: float
    stages_s: tuple[tuple[float, float], ...]  # (start, end) in each pipeline stage

    @property
    def started_s(self) -> float:
        """Start of the first stage."""
        return self.stages_s[0][0]

    @property
    def ended_s(self) -> float:
        """End of the last stage."""
        return self.stages_s[-1][1]


class SimulatedExecutor(Generic[Batch, Output]):
    """A worker whose batches take the time of its cost model; it runs only ``output_fn``.

    A stage works on one batch at a time, in order: batch n enters stage k when it has left stage k-1 and batch n-1 has
    left stage k (ORCA Fig. 8a). Stages have room for the batches that wait before them.

    Args:
        cost_model: seconds a batch takes; a sequence gives a pipeline, one cost model per stage.
        output_fn: the output of a batch, asked for at its end; an exception becomes the output.
        max_in_flight: batches taken before the first has completed; None: the number of stages.

    Raises:
        InvalidInputError: there is no stage, or ``max_in_flight`` is below 1.

    Example:
        >>> executor = SimulatedExecutor(lambda batch: 0.010 + 0.001 * len(batch), lambda batch: [0] * len(batch))
        >>> executor.max_in_flight
        1
    """

    def __init__(
        self,
        cost_model: Callable[[Batch], float] | Sequence[Callable[[Batch], float]],
        output_fn: Callable[[Batch], Output],
        *,
        max_in_flight: int | None = None,
    ) -> None:
        self._stages = (cost_model,) if callable(cost_model) else tuple(cost_model)
        if not self._stages:
            raise InvalidInputError("a simulated executor needs at least one stage: pass a cost model for each")
        self.max_in_flight = require_in_flight(len(self._stages) if max_in_flight is None else max_in_flight)
        self._output_fn = output_fn
        self.bind(WorkerId(0), VirtualClock(), itertools.count())

    def bind(self, worker: WorkerId, clock: VirtualClock, numbers: Iterator[int]) -> None:
        """Begin anew as ``worker`` on ``clock``, with ``numbers`` for its runs; the loop calls it."""
        self._worker = worker
        self._clock = clock
        self._numbers = numbers
        self._stage_free_s = [-math.inf] * len(self._stages)  # when each stage has ended all it was given
        self._in_flight: deque[SimulatedRun[Batch]] = deque()
        self.runs: list[SimulatedRun[Batch]] = []  # every batch submitted, in order

    @staticmethod
    def as_workers(executors: Sequence[SimulatedExecutor[Any, Any]], clock: Clock) -> Workers[Any, Any]:
        """Return ``executors`` on one virtual clock.

        Raises:
            InvalidInputError: ``clock`` is not virtual.
        """
        if not isinstance(clock, VirtualClock):
            raise InvalidInputError(f"simulated executors need a VirtualClock, got a {type(clock).__name__}")
        numbers = itertools.count()
        for index, executor in enumerate(executors):
            executor.bind(WorkerId(index), clock, numbers)
        return _SimulatedWorkers(executors, clock)

    @property
    def next_end_s(self) -> float:
        """End of the oldest batch in flight, in seconds; infinity if there is none."""
        return self._in_flight[0].ended_s if self._in_flight else math.inf

    def submit(self, batch: Batch) -> None:
        """Put ``batch`` into the pipeline now.

        Raises:
            InvalidInputError: a cost model gave a time that is negative or not finite.
        """
        at_s = submitted_s = self._clock.now()
        stages_s = []
        for index, cost_model in enumerate(self._stages):
            cost_s = cost_model(batch)
            if not 0 <= cost_s < math.inf:
                raise InvalidInputError(f"the cost model of stage {index} gave {cost_s} s for {batch!r}")
            start_s = max(at_s, self._stage_free_s[index])
            at_s = self._stage_free_s[index] = start_s + cost_s
            stages_s.append((start_s, at_s))
        run = SimulatedRun(next(self._numbers), self._worker, batch, submitted_s, tuple(stages_s))
        self._in_flight.append(run)
        self.runs.append(run)

    def wait(self, timeout_s: float | None) -> tuple[Batch, Output | BaseException] | None:
        """Move the clock to the end of the oldest batch and return it, or to the end of the timeout."""
        done = _SimulatedWorkers([self], self._clock).wait(None if timeout_s is None else self._clock.now() + timeout_s)
        return None if done is None else (done.batch, done.output)

    def take(self) -> tuple[Batch, Output | BaseException]:
        """Return the oldest batch in flight with its output; its end must have come."""
        batch = self._in_flight.popleft().batch
        try:
            return batch, self._output_fn(batch)
        except Exception as error:  # noqa: BLE001 - a request boundary: reported to the scheduler
            return batch, error

    def interrupt(self) -> None:
        """Do nothing: simulations have one thread, and the loop looks at its inbox before it waits."""

    def close(self) -> None:
        """Do nothing: there is nothing to release, and ``runs`` stay."""


class _SimulatedWorkers(Generic[Batch, Output]):
    """Simulated executors, waited for by moving their clock."""

    def __init__(self, executors: Sequence[SimulatedExecutor[Batch, Output]], clock: VirtualClock) -> None:
        self.executors = tuple(executors)
        self._clock = clock

    def wait(self, until_s: float | None) -> Completion[Batch, Output] | None:
        worker = min(range(len(self.executors)), key=lambda index: self.executors[index].next_end_s)
        end_s = self.executors[worker].next_end_s
        if until_s is None and end_s == math.inf:
            raise ServingError("the simulation waits forever: nothing is in flight and the scheduler names no wake_at")
        if until_s is not None and (until_s < end_s or end_s == math.inf):
            if until_s < math.inf:
                self._clock.advance_to(max(until_s, self._clock.now()))
            return None
        self._clock.advance_to(max(end_s, self._clock.now()))
        return Completion(WorkerId(worker), *self.executors[worker].take())

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["ServedRequest", "SimulatedExecutor", "SimulatedRun", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A simulated request that has left. Times are seconds of the virtual clock."""

    request_id: str
    arrival_s: float
    finished_s: float
    finished: Finished[Any]

    @property
    def latency_s(self) -> float:
        """Seconds from arrival to leaving."""
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Simulation(Generic[Batch]):
    """Result of a simulated trace."""

    requests: tuple[ServedRequest, ...]  # in order of leaving
    runs: tuple[SimulatedRun[Batch], ...]  # in order of submission
    ended_s: float  # when the last request left

    def __getitem__(self, request_id: str) -> ServedRequest:
        return next(served for served in self.requests if served.request_id == request_id)


class _Observer(Generic[Batch, Output]):
    """Records when requests came and left; passes on to another listener."""

    def __init__(self, listener: Listener[Batch, Output] | None) -> None:
        self.arrivals_s: dict[str, float] = {}
        self.requests: list[ServedRequest] = []
        self._listener = listener

    def on_output(self, batch: Batch, output: Output, now: float) -> None:
        if self._listener is not None:
            self._listener.on_output(batch, output, now)

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        arrival_s = self.arrivals_s.pop(finished.request_id)
        self.requests.append(ServedRequest(finished.request_id, arrival_s, now, finished))
        if self._listener is not None:
            self._listener.on_finished(finished, now)


def simulate(
    scheduler: Scheduler[Request, Batch, Output],
    executors: SimulatedExecutor[Batch, Output] | Sequence[SimulatedExecutor[Batch, Output]],
    trace: Iterable[tuple[float, Request]],
    *,
    request_id: Callable[[Request], str] | None = None,
    cancellations: Iterable[tuple[float, str]] = (),
    clock: VirtualClock | None = None,
    recorder: LoopRecorder | None = None,
    listener: Listener[Batch, Output] | None = None,
) -> Simulation[Batch]:
    """Serve ``trace`` in virtual time, to its end. Equal arguments give equal results.

    When the trace is over and nothing moves any more, the loop drains, so that a scheduler that waits for a full batch
    runs a partial one.

    Args:
        scheduler: the one to try; new, as it keeps its state.
        executors: one per worker, or a single one; they begin anew.
        trace: (arrival in seconds, request), by time; may be a generator.
        request_id: the id of a request; None: its ``request_id``.
        cancellations: (time in seconds, request id), by time; at equal times after the arrivals.
        clock: to share with a recorder; None: a new one at 0.
        recorder: as for ``ServingLoop``; its clock must be ``clock``.
        listener: as for ``ServingLoop``.

    Raises:
        InvalidInputError: times run backwards, or two unfinished requests share an id.
        ServingError: the scheduler keeps requests but offers no batch and no ``wake_at``, even while draining.

    Example:
        >>> from mlsys_core.loop import ServeRequest
        >>> from mlsys_core.loop.baselines import ZeroBatch
        >>> executor = SimulatedExecutor(lambda batch: 2.0, lambda batch: [None] * batch.size)
        >>> trace = [(at, ServeRequest(name, None)) for at, name in [(0, "a"), (1, "b"), (1.5, "c")]]
        >>> simulation = simulate(ZeroBatch(max_batch_size=8), executor, trace)
        >>> [(served.request_id, served.latency_s) for served in simulation.requests]
        [('a', 2.0), ('b', 3.0), ('c', 2.5)]
    """
    clock = VirtualClock() if clock is None else clock
    workers = executors if isinstance(executors, Sequence) else [executors]
    observer = _Observer(listener)
    id_of = attrgetter("request_id") if request_id is None else request_id
    with ServingLoop(scheduler, workers, clock, recorder=recorder, listener=observer) as loop:

        def arrive(request: Request) -> None:
            observer.arrivals_s[id_of(request)] = clock.now()
            loop.submit(request, id_of(request))

        arrivals = ((time_s, partial(arrive, request)) for time_s, request in trace)
        departures = ((time_s, partial(loop.cancel, cancelled)) for time_s, cancelled in cancellations)
        for time_s, act in heapq.merge(arrivals, departures, key=itemgetter(0)):
            if not clock.now() <= time_s < math.inf:
                raise InvalidInputError(
                    f"the trace has {time_s} s after {clock.now()} s: times must be finite and rise"
                )
            while clock.now() < time_s:
                loop.step(until_s=time_s)
            act()
        _finish(loop, clock)
    runs = sorted((run for worker in workers for run in worker.runs), key=attrgetter("number"))
    return Simulation(tuple(observer.requests), tuple(runs), clock.now())


def _finish(loop: ServingLoop[Any, Any, Any], clock: VirtualClock) -> None:
    """Step until nothing is unfinished; drain when nothing moves otherwise."""
    while loop.num_unfinished:
        before_s = clock.now()
        if loop.step(until_s=math.inf) or clock.now() > before_s:
            continue
        if loop.state is LoopState.DRAINING:
            raise ServingError(
                f"the simulation is stuck at {before_s} s: the scheduler keeps {loop.num_unfinished} requests, but "
                "offers no batch and no wake_at; let next_batch run what waits once drain() was called"
            )
        loop.drain(0)
