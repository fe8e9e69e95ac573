"""The request-level baselines on a model's cost: what DVABatch's policies are compared with (section 8.1).

Staged model + load -> core's simulation with the very schedulers that serve -> latency and throughput of each baseline.
The whole model runs one batch at a time; nothing joins or leaves a batch on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Scheduler, ServeRequest, SimulatedExecutor, simulate
from mlsys_core.loop.baselines import DelayBatch, RequestBatch, StaticBatch, ZeroBatch
from mlsys_core.workload import LatencySummary, LoadPoint, Poisson
from mlsys_dvabatch.stages.simulated import StagedModel
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

NewScheduler = Callable[[], Scheduler[ServeRequest[None], RequestBatch[None], list[None]]]


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """One baseline at one load."""

    policy: str  # "ZeroBatch", "DelayBatch", "StaticBatch"
    setting: str  # what was tuned: the window or the batch size; "" if nothing is
    load: float  # offered load over the model's peak
    mean_batch_size: float
    point: LoadPoint  # offered load, throughput (requests per second) and latency (seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and limits with which each baseline is tried.

    Raises:
        InvalidInputError: a number is out of range.
    """

    max_batch_size: int = 64
    num_requests: int = 4000  # per run
    seed: int = 0  # seed of arrivals; with one seed all loads get the same pattern, only faster

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.num_requests < 2 or self.seed < 0:
            raise InvalidInputError(
                f"max_batch_size={self.max_batch_size}, num_requests={self.num_requests}, seed={self.seed}: at least 1 "
                "request in a batch and 2 in a run are needed, and a seed of 0 or more"
            )


def compare_baselines(
    model: StagedModel,
    loads: Sequence[float],
    *,
    workload: Workload,
    window_s: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[BaselineResult]:
    """Compare ZeroBatch, DelayBatch and StaticBatch under Poisson arrivals.

    Args:
        model: Stages, with the cost of a batch.
        loads: Parts of the peak throughput, that of full batches back to back; in (0, 1).
        workload: Requests and limits of each trial.
        window_s: DelayBatch's window. None: of a half, a quarter, ... of a full batch's time, the one with the lowest
            average latency at the highest load, and it for all loads, as an operator tunes it once.
        progress: Called after each load.

    Returns:
        Three results for each load, in the order of ``loads``. StaticBatch has at each load its own best batch size.

    Raises:
        InvalidInputError: no load, one outside (0, 1), or a negative window.

    Example:
        >>> from mlsys_dvabatch.stages.simulated import parse_stages
        >>> results = compare_baselines(parse_stages("4+0.5"), [0.5], workload=Workload(num_requests=200))
        >>> [result.policy for result in results]
        ['ZeroBatch', 'DelayBatch', 'StaticBatch']
    """
    if not loads or not all(0 < load < 1 for load in loads):
        raise InvalidInputError(f"loads {list(loads)}: give at least one, each a part of the peak above 0 and below 1")
    if window_s is not None and not 0 <= window_s < math.inf:
        raise InvalidInputError(f"window_s={window_s}: DelayBatch's window must be 0 or more seconds, and finite")
    max_batch_size = workload.max_batch_size
    if window_s is None:
        windows_s = [model.seconds(max_batch_size) / divisor for divisor in (2, 4, 8, 16, 32)]
        tried = [_delay_batch(model, max(loads), window_s, workload) for window_s in windows_s]
        window_s = windows_s[tried.index(min(tried, key=_mean_latency))]
    results = []
    for load in loads:
        zero_batch = partial(ZeroBatch[None, None], max_batch_size=max_batch_size)
        results.append(_run("ZeroBatch", "", zero_batch, model, load, workload))
        results.append(_delay_batch(model, load, window_s, workload))
        results.append(_best_static_batch(model, load, workload))
        progress()
    return results


def _delay_batch(model: StagedModel, load: float, window_s: float, workload: Workload) -> BaselineResult:
    delay_batch = partial(DelayBatch[None, None], max_batch_size=workload.max_batch_size, delay_s=window_s)
    return _run("DelayBatch", f"window {window_s * 1e3:.3g} ms", delay_batch, model, load, workload)


def _best_static_batch(model: StagedModel, load: float, workload: Workload) -> BaselineResult:
    """Run the batch sizes that keep up with the load, and return the one with the lowest average latency.

    Sizes are the powers of two and the maximum.
    """
    max_batch_size = workload.max_batch_size
    sizes = [2**power for power in range(max_batch_size.bit_length()) if 2**power < max_batch_size] + [max_batch_size]
    offered_rps = load * model.peak_rps(max_batch_size)

    tried = [
        _run("StaticBatch", f"size {size}", partial(StaticBatch[None, None], batch_size=size), model, load, workload)
        for size in sizes
        if model.peak_rps(size) > offered_rps
    ]
    return min(tried, key=_mean_latency)


def _mean_latency(result: BaselineResult) -> float:
    return result.point.latency.mean


def _run(
    policy: str, setting: str, new_scheduler: NewScheduler, model: StagedModel, load: float, workload: Workload
) -> BaselineResult:
    offered_rps = load * model.peak_rps(workload.max_batch_size)
    times_s = Poisson(offered_rps).times(workload.num_requests, np.random.default_rng(workload.seed))
    executor: SimulatedExecutor[RequestBatch[None], Any] = SimulatedExecutor(
        lambda batch: model.seconds(batch.size), lambda batch: [None] * batch.size
    )
    trace = ((float(at_s), ServeRequest(str(number), None)) for number, at_s in enumerate(times_s))
    simulation = simulate(new_scheduler(), executor, trace)
    latency = LatencySummary.of(served.latency_s for served in simulation.requests)
    assert latency is not None  # there are requests
    throughput_rps = len(simulation.requests) / (simulation.ended_s - float(times_s[0]))
    return BaselineResult(
        policy=policy,
        setting=setting,
        load=load,
        mean_batch_size=len(simulation.requests) / len(simulation.runs),
        point=LoadPoint(offered_rps=offered_rps, throughput_rps=throughput_rps, latency=latency),
    )


def print_json(results: Sequence[BaselineResult], model: StagedModel, workload: Workload) -> None:
    """Print the results with their model, workload and environment."""
    report = {
        "model": asdict(model),
        "workload": asdict(workload),
        "results": [asdict(result) for result in results],
        "environment": describe_environment(),
    }
    print(json.dumps(report, indent=1))


def print_table(results: Sequence[BaselineResult], model: StagedModel, max_batch: int) -> None:
    """Print a row for each baseline and load, and the peak throughput."""
    table = Table("load", "policy", "tuned", box=SIMPLE, padding=(0, 1, 0, 0))
    for header in ("batch", "average (ms)", "p99 (ms)", "req/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        latency = result.point.latency
        table.add_row(
            f"{result.load:g}",
            result.policy,
            result.setting,
            f"{result.mean_batch_size:.1f}",
            f"{latency.mean * 1e3:.2f}",
            f"{latency.p99 * 1e3:.2f}",
            f"{result.point.throughput_rps:,.1f}",
            end_section=result.policy == results[-1].policy,
        )
    console = Console()
    console.print(table)
    seconds = model.seconds(max_batch)
    console.print(f"Peak {model.peak_rps(max_batch):,.1f} req/s: batches of {max_batch}, {seconds * 1e3:g} ms each")
