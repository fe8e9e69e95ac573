"""Simulation with the serving loop and scheduler themselves: virtual time, and executors that only model durations.

Discrete events: nothing happens between the completions, arrivals and ``wake_at`` times, so the clock jumps from one
to the next. At one and the same time a completion is reported first, then arrivals are admitted, then workers are
filled; at equal times workers go by number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Generic

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.clock import VirtualClock
from mlsys_core.loop.inbox import LoopState
from mlsys_core.loop.protocols import (
    Batch,
    Finished,
    Listener,
    LoopRecorder,
    Output,
    Request,
    Scheduler,
)
from mlsys_core.loop.serving_loop import ServingLoop
from mlsys_core.loop.simulated_executor import SimulatedExecutor, SimulatedRun

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
