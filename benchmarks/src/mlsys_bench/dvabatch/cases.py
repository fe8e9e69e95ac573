"""Cases of a benchmark, and one run of one of them at one load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.loop import Scheduler, ServeRequest, SimulatedExecutor, Simulation, simulate
from mlsys_core.loop.baselines import DelayBatch, StaticBatch, ZeroBatch
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler

from mlsys_bench.dvabatch.subjects import Subject

Trace = Sequence[tuple[float, ServeRequest[Any]]]


@dataclass(frozen=True, slots=True)
class Case:
    """A case: a policy of this package, or a scheduler of whole requests."""

    name: str
    make: Callable[[], Policy | Scheduler[Any, Any, Any]]
    num_pairs: int | None = None  # buffer pairs; None: what the policy is made for


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run: latencies, throughput and what each request got."""

    case: str
    offered_rps: float | None
    latencies_s: tuple[float, ...]  # in order of arrival
    throughput_rps: float
    operations: dict[str, int]
    results: dict[str, Any]

    @property
    def mean_s(self) -> float:
        """Average latency."""
        return float(np.mean(self.latencies_s))

    @property
    def p99_s(self) -> float:
        """Latency that one in a hundred exceeds."""
        return float(np.percentile(self.latencies_s, 99))

    @property
    def point(self) -> LoadPoint:
        """This run as a point of a load curve."""
        latency = LatencySummary.of(self.latencies_s)
        assert latency is not None
        return LoadPoint(offered_rps=self.offered_rps, throughput_rps=self.throughput_rps, latency=latency)


def run_case(
    case: Case, subject: Subject, trace: Trace, *, max_batch_size: int = 64, offered_rps: float | None = None
) -> Outcome:
    """Serve ``trace`` with one case on one device, in virtual time."""
    made = case.make()
    scheduler: Scheduler[Any, Any, Any]
    workers: list[SimulatedExecutor[Any, Any]]
    if isinstance(made, Policy):
        scheduler = DvaScheduler(
            made, subject.costs, max_batch_size=max_batch_size, num_pairs=case.num_pairs, concurrency=1
        )
        workers = [SimulatedExecutor(subject.task_s, subject.task_output) for _ in range(subject.costs.num_stages)]
    else:
        scheduler = made
        workers = [SimulatedExecutor(subject.whole_s, subject.whole_output)]
    run: Simulation[Any] = simulate(scheduler, workers, trace)
    by_id = {served.request_id: served for served in run.requests}
    operations = dict(scheduler.counters) if isinstance(scheduler, DvaScheduler) else {}
    return Outcome(
        case=case.name,
        offered_rps=offered_rps,
        latencies_s=tuple(by_id[request.request_id].latency_s for _, request in trace),
        throughput_rps=len(trace) / (run.ended_s - trace[0][0]),
        operations={**operations, "batches": len(run.runs)},
        results={name: served.finished.result for name, served in by_id.items()},
    )


def zero_batch(max_batch_size: int = 64) -> Case:
    """Return ZeroBatch: all waiting requests start at once, up to ``max_batch_size``."""
    return Case("ZeroBatch", lambda: ZeroBatch(max_batch_size=max_batch_size))


def delay_batch(window_s: float, max_batch_size: int = 64) -> Case:
    """Return DelayBatch: a batch starts when its window has passed or it is full."""
    return Case("DelayBatch", lambda: DelayBatch(max_batch_size=max_batch_size, delay_s=window_s))


def capped(size: int) -> Case:
    """Return the best-static rival: all waiting requests start at once, in batches of at most ``size``."""
    return Case(f"at most {size}", lambda: ZeroBatch(max_batch_size=size))


def static_batch(size: int) -> Case:
    """Return StaticBatch: only full batches of ``size`` requests."""
    return Case(f"static {size}", lambda: StaticBatch(batch_size=size))


def best_static(
    subject: Subject, trace: Trace, *, max_batch_size: int = 64, offered_rps: float | None = None
) -> Outcome:
    """Return the run with the lowest average latency over all largest batch sizes, powers of two.

    This is the most that an operator could gain by tuning the size.
    """
    sizes = [2**power for power in range(max_batch_size.bit_length()) if 2**power <= max_batch_size]
    outcomes = [run_case(capped(size), subject, trace, offered_rps=offered_rps) for size in sizes]
    return min(outcomes, key=lambda outcome: outcome.mean_s)
