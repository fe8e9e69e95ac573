"""``mlsys orca bench`` and ``mlsys bench orca``: the scheduling policies against each other, in this process.

All requests at once, then a Poisson sweep; every policy gets the same requests, in turns, and its answers are compared
with the first policy's before any time counts. :mod:`.policies_report` makes the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section
from mlsys_core.workload import Uniform

from mlsys_orca.bench.workload import Workload

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

    from mlsys_orca.bench.answers import Comparison
    from mlsys_orca.bench.serve import ServedRun
    from mlsys_orca.loading.loaded import LoadedModel

POLICIES = ("orca", "paged", "chunked", "request-level")
LOADS = (0.25, 0.6, 0.9)  # of the best policy's throughput with all requests at once
QUICK_LOADS = (0.5, 0.9)
WORKLOAD = Workload(prompts=Uniform(16, 256), outputs=Uniform(1, 64), num_requests=96)
QUICK_WORKLOAD = Workload(prompts=Uniform(8, 64), outputs=Uniform(1, 16), num_requests=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Policies, loads and requests to measure."""

    workload: Workload
    policies: tuple[str, ...] = POLICIES
    rates: tuple[float, ...] | None = None  # requests per second; None: ``loads`` of what was measured all at once
    loads: tuple[float, ...] = LOADS
    max_batch_size: int = 32
    num_kv_tokens: int | None = None  # K/V slots; None: enough for a full batch of longest requests
    memory_pool: str | None = None  # of K/V blocks, by its registered name; None: the core's own


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy under one load."""

    policy: str
    rate: float | None  # requests per second; None: all at once
    run: ServedRun
    comparison: Comparison | None  # with the first policy's answers; None: it is the first


def plan_of(context: BenchContext) -> Plan:
    """Return the suite's plan, or its quick one."""
    return Plan(workload=QUICK_WORKLOAD, loads=QUICK_LOADS) if context.is_quick else Plan(workload=WORKLOAD)


def run(context: BenchContext) -> Section:
    """Run the suite over the default model."""
    from mlsys_orca.loading.named import DEFAULT_MODEL, load

    return run_plan(load(DEFAULT_MODEL, None, device=context.device), plan_of(context), context)


def run_plan(loaded: LoadedModel, plan: Plan, context: BenchContext) -> Section:
    """Measure what ``plan`` says; Ctrl-C ends it with what was measured.

    Raises:
        InvalidInputError: the plan names no policy, one that there is not, or requests that the model cannot hold.
    """
    from mlsys_core.plugins import installed_plugins

    from mlsys_orca.bench.policies_report import report
    from mlsys_orca.scheduling.policy import find_policy

    if not plan.policies:
        raise InvalidInputError("there is no policy to measure: give one or more, or leave --policy out")
    for policy in plan.policies:
        find_policy(policy, installed_plugins().registry)
    loads = [os.getloadavg()[0]]
    measured: list[Measurement] = []
    is_interrupted = False
    try:
        for measurement in measure(loaded, plan, context):
            measured.append(measurement)
            if measurement.run.result.interrupted:
                is_interrupted = True
                break
    except KeyboardInterrupt:
        is_interrupted = True
    loads.append(os.getloadavg()[0])
    return report(loaded, plan, measured, num_threads=context.num_threads, loads=loads, is_interrupted=is_interrupted)


def measure(loaded: LoadedModel, plan: Plan, context: BenchContext) -> Iterator[Measurement]:
    """Measure all policies at one load, then at the next; yield the measurements one by one."""
    from mlsys_core.workload.tables import progress_bar

    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.bench.answers import compare
    from mlsys_orca.bench.serve import serve_trace
    from mlsys_orca.engine.engine import EngineConfig

    requests = plan.workload.requests(loaded.tokenizer)
    longest = max(request.max_tokens for request in requests)
    at_once: dict[str, float] = {}
    expected: dict[int, tuple[int, ...]] = {}
    rates: Sequence[float | None] = [None]
    while rates:
        rate, *rates = rates
        for policy in plan.policies:
            label = policy if rate is None else f"{policy}, {rate:.3g} req/s"
            config = EngineConfig(
                max_batch_size=plan.max_batch_size,
                num_kv_tokens=plan.num_kv_tokens,
                max_model_len=longest,
                num_threads=context.num_threads,
                policy=policy,
                memory_pool=plan.memory_pool,
            )
            with progress_bar(context.console, label) as show:
                run = serve_trace(
                    loaded,
                    config,
                    plan.workload.trace(rate),
                    requests,
                    name=label,
                    available_nbytes=available_memory_nbytes(loaded.device),
                    on_progress=show,
                )
            comparison = compare(expected, run.answers, loaded=loaded, requests=requests) if expected else None
            expected = {**run.answers, **expected}
            yield Measurement(policy, rate, run, comparison)
            if rate is None:
                at_once[policy] = run.result.throughput_rps
        if rate is None:
            rates = plan.rates or [load * max(at_once.values()) for load in plan.loads]
