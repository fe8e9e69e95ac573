"""``mlsys orca bench`` and ``mlsys bench orca``: the scheduling policies against each other, in this process.

All requests at once, then a Poisson sweep; every policy gets the same requests, in turns, and its answers are compared
with the first policy's before any time counts. :mod:`.policies_report` makes the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section
from mlsys_core.workload import Uniform

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.orca.workload import Workload

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_orca.loading.loaded import LoadedModel

    from mlsys_bench.orca.answers import Comparison
    from mlsys_bench.orca.serve import ServedRun

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
    kv_dtype: str | None = None  # of keys and values; None: the model's


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy under one load."""

    policy: str
    rate: float | None  # requests per second; None: all at once
    run: ServedRun
    comparison: Comparison | None  # with the first policy's answers; None: it is the first


def run(
    context: BenchContext,
    *,
    model: str = "",
    dtype: str | None = None,
    policies: tuple[str, ...] = (),
    rates: tuple[float, ...] = (),
    requests: int = 0,
    prompts: str = "",
    outputs: str = "",
    shared_prefix: int = 0,
    max_batch_size: int = 32,
    kv_tokens: int = 0,
    memory_pool: str | None = None,
    kv_dtype: str | None = None,
) -> Section:
    """Measure policies on a real model; see :class:`Plan`.

    Args:
        context: The suite's context.
        model: A name, a GGUF file or a folder; empty: the default model.
        dtype: As ``mlsys orca serve`` takes it.
        policies: Their names; none: :data:`POLICIES`.
        rates: Requests a second; none: shares of what the best policy does at once.
        requests: Of each run; 0: as many as the suite's workload has.
        prompts: Lengths such as ``uniform:16:256``; empty: the suite's.
        outputs: Written likewise.
        shared_prefix: Tokens that all prompts begin with.
        max_batch_size: Requests an iteration at most.
        kv_tokens: K/V slots; 0: a full batch of longest requests.
        memory_pool: Registered name of the pool of K/V blocks.
        kv_dtype: Of keys and values, as ``mlsys orca serve`` takes it.
    """
    from mlsys_orca.loading.named import DEFAULT_MODEL, load

    from mlsys_bench.workload.parse import parse_lengths

    workload = QUICK_WORKLOAD if context.is_quick else WORKLOAD
    workload = dataclasses.replace(
        workload,
        prompts=parse_lengths(prompts) if prompts else workload.prompts,
        outputs=parse_lengths(outputs) if outputs else workload.outputs,
        num_requests=requests or workload.num_requests,
        shared_prefix=shared_prefix,
    )
    plan = Plan(
        workload=workload,
        policies=policies or POLICIES,
        rates=tuple(map(float, rates)) or None,
        loads=QUICK_LOADS if context.is_quick else LOADS,
        max_batch_size=max_batch_size,
        num_kv_tokens=kv_tokens or None,
        memory_pool=memory_pool,
        kv_dtype=kv_dtype,
    )
    return run_plan(load(model or DEFAULT_MODEL, dtype, device=context.device), plan, context)


def run_plan(loaded: LoadedModel, plan: Plan, context: BenchContext) -> Section:
    """Measure what ``plan`` says; Ctrl-C ends it with what was measured.

    Raises:
        InvalidInputError: the plan names no policy, one that there is not, or requests that the model cannot hold.
    """
    from mlsys_core.plugins import installed_plugins
    from mlsys_orca.scheduling.policy import find_policy

    from mlsys_bench.orca.policies_report import report

    if not plan.policies:
        raise InvalidInputError("there is no policy to measure: give one or more, or leave --policy out")
    for policy in plan.policies:
        find_policy(policy, installed_plugins().registry)
    measured: list[Measurement] = []
    is_interrupted = False
    with LoadMeter() as meter:
        try:
            for measurement in measure(loaded, plan, context):
                measured.append(measurement)
                if measurement.run.result.interrupted:
                    is_interrupted = True
                    break
        except KeyboardInterrupt:
            is_interrupted = True
    return report(
        loaded, plan, measured, num_threads=context.num_threads, load=meter.load, is_interrupted=is_interrupted
    )


def measure(loaded: LoadedModel, plan: Plan, context: BenchContext) -> Iterator[Measurement]:
    """Measure all policies at one load, then at the next; yield the measurements one by one."""
    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.engine.engine import EngineConfig

    from mlsys_bench.orca.answers import compare
    from mlsys_bench.orca.serve import serve_trace
    from mlsys_bench.workload.tables import progress_bar

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
                kv_dtype=plan.kv_dtype,
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
