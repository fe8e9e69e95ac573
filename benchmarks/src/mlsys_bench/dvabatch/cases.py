"""Models that a benchmark serves, its cases, and one run of one of them at one load, in virtual time.

A model is costs alone, or a real one: each task is executed when it is submitted, and takes as long as it took this
thread's processor. So others on the machine neither lengthen the times nor the arrivals, and one core is what is
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from mlsys_core.loop import Scheduler, ServeRequest, SimulatedExecutor, Simulation, simulate
from mlsys_core.loop.baselines import DelayBatch, RequestBatch, StaticBatch, ZeroBatch
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.scheduling.costs import StageCosts, remaining_s
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, simulated_output, task_s
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask


class Subject(Protocol):
    """Source of the seconds and outputs of tasks and of whole batches."""

    @property
    def costs(self) -> StageCosts:
        """Costs by which policies decide."""
        ...

    def task_s(self, task: StageTask) -> float:
        """Return the seconds that a task takes."""
        ...

    def task_output(self, task: StageTask) -> StageOutput:
        """Return the task's output; called after :meth:`task_s`."""
        ...

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Return the seconds that a batch of whole requests takes."""
        ...

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return the batch's output; called after :meth:`whole_s`."""
        ...


class Costed:
    """A model of which only the measured costs are used; ``overhead_s`` comes on top of each task and whole batch."""

    def __init__(self, costs: StageCosts, overhead_s: float = 0.0) -> None:
        self.costs = costs
        self._overhead_s = overhead_s

    def task_s(self, task: StageTask) -> float:
        """Return the task's seconds from the table of costs."""
        return task_s(self.costs, task) + self._overhead_s

    def task_output(self, task: StageTask) -> StageOutput:
        """Return an output of None for each request."""
        return simulated_output(task)

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Return the batch's seconds from the table of costs."""
        return remaining_s(self.costs, 0, batch.size, batch.padded_length) + self._overhead_s

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return None for each request."""
        return [None] * batch.size


class Timed:
    """A model that runs. One run at a time.

    Args:
        runner: new for each run.
        costs: what policies decide by.
        clock: seconds of this thread.
    """

    def __init__(self, runner: StageRunner, costs: StageCosts, clock: Callable[[], float] = time.thread_time) -> None:
        self.costs = costs
        self._runner = runner
        self._clock = clock
        self._outputs: dict[int, Any] = {}

    def task_s(self, task: StageTask) -> float:
        """Run the task and return its processor time in seconds."""
        return self._timed(task.number, lambda: self._runner.run(task))

    def task_output(self, task: StageTask) -> StageOutput:
        """Return the output of the task, which :meth:`task_s` has run."""
        output: StageOutput = self._outputs.pop(task.number)
        return output

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Run the batch through all stages and return its processor time in seconds."""
        return self._timed(id(batch), lambda: self._runner.run_whole(batch))

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return the output of the batch, which :meth:`whole_s` has run."""
        output: list[Any] = self._outputs.pop(id(batch))
        return output

    def _timed(self, key: int, run: Callable[[], Any]) -> float:
        start_s = self._clock()
        self._outputs[key] = run()
        return self._clock() - start_s


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
