"""Serving a trace in virtual time while every batch is really computed.

Each system's scheduler runs under core's simulation; a batch takes the CPU time that computing it just took, plus
what scheduling costs. So a sweep of loads takes as long as its work and no longer, systems can take turns, and
other work on the machine delays nobody's requests (it still slows caches). Outputs are real and are compared.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlsys_core.errors import MlsysError
from mlsys_core.loop import FinishReason, SimulatedExecutor, VirtualClock, simulate
from mlsys_core.workload import LatencySummary, LoadPoint
from numpy.typing import NDArray

Request = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """One system on one trace. Times in seconds."""

    name: str
    offered_rps: float
    latencies_s: tuple[float, ...]  # arrival to result, in order of the trace, without the warm-up part
    queue_s: tuple[float, ...]  # arrival to start of execution
    compute_s: tuple[float, ...]  # start to result
    throughput_rps: float
    batch: float  # rows a step on average, without padding
    waste: float  # part of the computed cells that is padding
    outputs: Mapping[int, NDArray[Any]] = field(repr=False)  # outputs of the first requests, to compare

    @property
    def latency(self) -> LatencySummary:
        """Distribution of the latencies."""
        summary = LatencySummary.of(self.latencies_s)
        assert summary is not None
        return summary

    def point(self) -> LoadPoint:
        """Return the point that plots show."""
        return LoadPoint(offered_rps=self.offered_rps, throughput_rps=self.throughput_rps, latency=self.latency)


@dataclass(frozen=True, slots=True)
class Served:
    """Output of a system for one request, and the time it started."""

    output: NDArray[Any]
    started_s: float  # seconds of the virtual clock


@dataclass(slots=True)
class System:
    """A system, made anew for each run.

    ``computes`` run batches for real, at the virtual time their clock shows; ``unpack`` says what a request got.
    """

    scheduler: Any
    computes: Sequence[Callable[[Any], Any]]  # one for each worker
    make: Callable[[str, Request], Any]  # a request of the scheduler, from its id and tensors
    unpack: Callable[[Any, Request], Served]
    stats: Callable[[], tuple[float, float]]  # (rows a step, part that is padding)


class CpuTime:
    """CPU seconds of calls in this thread, and of what is done between them; without the cost of reading the clock."""

    def __init__(self) -> None:
        samples = []
        for _ in range(20):
            start = time.thread_time()
            samples.append(time.thread_time() - start)
        self._reading_s = float(np.median(samples))
        self._ended_s = time.thread_time()

    def of(self, call: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
        """Call it; return its result, and the CPU seconds of all that was done since the last call."""
        result = call(argument)
        end = time.thread_time()
        spent = max(1e-6, end - self._ended_s - self._reading_s)
        self._ended_s = end
        return result, spent


def run(
    name: str,
    make_system: Callable[[VirtualClock], System],
    requests: Sequence[Request],
    arrivals_s: Sequence[float],
    *,
    num_compared: int = 8,
    warmup: float = 0.1,
) -> Run:
    """Serve ``requests`` at ``arrivals_s``.

    What scheduling costs is in it: a batch takes the CPU time of computing it and of all that was done since the last
    one was computed, such as unfolding and admitting arrivals, completion, batching.

    Raises:
        MlsysError: a request did not finish.
    """
    clock = VirtualClock()
    system = make_system(clock)
    gc.collect()  # else a collection of some 75 ms falls into one system's time
    meter = CpuTime()
    made: dict[int, Any] = {}

    def executor(compute: Callable[[Any], Any]) -> SimulatedExecutor[Any, Any]:
        def cost_s(batch: Any) -> float:
            made[id(batch)], spent = meter.of(compute, batch)
            return spent

        return SimulatedExecutor(cost_s, lambda batch: made.pop(id(batch)))

    by_id = {str(number): request for number, request in enumerate(requests)}
    trace = ((at, system.make(number, by_id[number])) for at, number in zip(arrivals_s, by_id, strict=True))
    simulation = simulate(
        system.scheduler,
        [executor(compute) for compute in system.computes],
        trace,
        request_id=lambda request: request.request_id,
        clock=clock,
    )
    served = {each.request_id: each for each in simulation.requests}
    lost = [each for each in served.values() if each.finished.reason is not FinishReason.DONE]
    if lost:
        raise MlsysError(f"{name}: {len(lost)} requests did not finish; the first: {lost[0].finished.error!r}")
    latencies, queues, computes, outputs = [], [], [], {}
    for position, (number, request) in enumerate(by_id.items()):
        each = served[number]
        got = system.unpack(each.finished.result, request)
        if position < num_compared:
            outputs[position] = got.output
        if position >= warmup * len(requests):
            latencies.append(each.latency_s)
            queues.append(max(0.0, got.started_s - each.arrival_s))
            computes.append(each.finished_s - max(got.started_s, each.arrival_s))
    batch, waste = system.stats()
    span = simulation.ended_s - arrivals_s[0]
    offered = (len(requests) - 1) / (arrivals_s[-1] - arrivals_s[0]) if arrivals_s[-1] > arrivals_s[0] else 0.0
    return Run(
        name,
        offered,
        tuple(latencies),
        tuple(queues),
        tuple(computes),
        len(requests) / span,
        batch,
        waste,
        outputs,
    )


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return arrival times in seconds; all at once for an infinite rate."""
    if rate == float("inf"):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    times: list[float] = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return times
