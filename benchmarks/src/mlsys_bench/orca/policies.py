"""``mlsys orca bench`` and ``mlsys bench orca``: the scheduling policies against each other, in this process.

All requests at once, then a Poisson sweep; every policy gets the same requests, in turns, and its answers are compared
with the first policy's before any time counts. :mod:`.policies_report` makes the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Figure, Section, Table

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.orca.serve import Workload
from mlsys_bench.workload.lengths import Uniform

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.workload import LatencySummary
    from mlsys_orca.loading.loaded import LoadedModel

    from mlsys_bench.harness.machine import Load
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


_COLUMNS = (
    "policy",
    "out tok/s",
    "TTFT p50 ms",
    "p99",
    "ITL p50 ms",
    "p99",
    "ms per token",
    "pre- empted",
    "prefix hits",
    "answers",
)


def report(
    loaded: LoadedModel,
    plan: Plan,
    measured: Sequence[Measurement],
    *,
    num_threads: int,
    load: Load,
    is_interrupted: bool,
) -> Section:
    """Return the page's section; it has failed if a policy gave wrong answers, whose times are left out then.

    Args:
        loaded: The model.
        plan: The plan of the measurements.
        measured: The measurements so far, in order.
        num_threads: Threads of the model's operators.
        load: Load of the machine meanwhile.
        is_interrupted: True if the measurements ended early.
    """
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    body: list[str | Table | Figure] = [
        f"{loaded.name} in {dtype}, {num_threads} threads, at most {plan.max_batch_size} requests per iteration; "
        f"{plan.workload.num_requests} requests, prompts {plan.workload.prompts}, answers {plan.workload.outputs}"
        + (f", {plan.workload.shared_prefix} tokens that all begin with" if plan.workload.shared_prefix else "")
        + ". The engine runs in this process; tokens are counted as they reach the client. Every policy gets the same "
        "requests, in turns; latencies count from when a request was due.",
        str(load),
    ]
    if is_interrupted:
        body.append("Interrupted: what was measured until then.")
    body += [_table(rate, [each for each in measured if each.rate == rate]) for rate in _rates(measured)]
    body += _warnings(measured)
    svg = _figure(measured)
    if svg:
        body.append(Figure(svg, "Median latency per output token against throughput, from light to heavy load"))
    is_wrong = any(each.comparison is not None and each.comparison.num_wrong for each in measured)
    if is_wrong:
        body.append("A policy's answers differ from the first one's by more than rounding: its times mean nothing.")
    data = {
        "model": loaded.name,
        "dtype": dtype,
        "num_threads": num_threads,
        "max_batch_size": plan.max_batch_size,
        "num_kv_tokens": plan.num_kv_tokens,
        "num_requests": plan.workload.num_requests,
        "shared_prefix": plan.workload.shared_prefix,
        "workload": dict(plan.workload.trace(None).made_by),
        "load_average": list(load.load_average),
        "share_of_others": load.share_of_others,
        "interrupted": is_interrupted,
        "runs": [_record(each) for each in measured],
    }
    return Section("Orca: scheduling policies", body, status="failed" if is_wrong else "ok", data=data)


def _rates(measured: Sequence[Measurement]) -> list[float | None]:
    """Return the loads in order of measurement."""
    return list(dict.fromkeys(each.rate for each in measured))


def _table(rate: float | None, measured: Sequence[Measurement]) -> Table:
    """Return a table of all policies under one load."""
    caption = "All requests at once" if rate is None else f"{rate:.3g} requests per second"
    return Table(_COLUMNS, [_row(each) for each in measured], caption=caption)


def _warnings(measured: Sequence[Measurement]) -> list[str]:
    """Return one line for each kind of warning, with the first run that has it."""
    from mlsys_bench.workload.tables import warnings_of

    kinds: dict[str, list[str]] = {}
    for each in measured:
        for warning in warnings_of(each.run.result):
            kinds.setdefault(warning.partition(":")[0], []).append(f"{each.run.result.name}: {warning}")
    return [
        first + (f" (and in {len(others)} more runs, see the JSON)" if others else "")
        for first, *others in kinds.values()
    ]


def _row(measured: Measurement) -> list[str]:
    result, comparison = measured.run.result, measured.comparison
    times = ["-"] * 6
    if comparison is None or not comparison.num_wrong:
        # Tokens that came all at once with the answer's end have no time between them.
        itl = result.itl if result.itl is not None and result.itl.max > 1e-3 else None
        times = [
            f"{result.throughput_tokens_per_s:.1f}",
            *_milliseconds(result.ttft),
            *_milliseconds(itl),
            _milliseconds(result.normalized_latency)[0],
        ]
    counts = [measured.run.num_preemptions, measured.run.num_cached_tokens]
    answers = "reference" if comparison is None else str(comparison)
    return [measured.policy, *times, *("-" if count is None else str(count) for count in counts), answers]


def _milliseconds(summary: LatencySummary | None) -> tuple[str, str]:
    """Return the median and the 99th percentile as texts, in milliseconds."""
    return ("-", "-") if summary is None else (f"{summary.p50 * 1e3:.0f}", f"{summary.p99 * 1e3:.0f}")


def _figure(measured: Sequence[Measurement]) -> str | None:
    from mlsys_core import plot

    from mlsys_bench.harness import plots

    points: dict[str, list[Any]] = {}
    for each in measured:
        is_wrong = each.comparison is not None and each.comparison.num_wrong
        if each.rate is not None and each.run.result.successes and not is_wrong:
            points.setdefault(each.policy, []).append(each.run.result.point())
    return plot.to_svg(plots.throughput_latency(points)) if points else None


def _record(measured: Measurement) -> dict[str, Any]:
    comparison = measured.comparison
    return {
        "policy": measured.policy,
        "rate": measured.rate,
        "num_preemptions": measured.run.num_preemptions,
        "num_cached_tokens": measured.run.num_cached_tokens,
        "answers": "reference"
        if comparison is None
        else {
            "num_compared": comparison.num_compared,
            "num_ties": len(comparison.differences) - comparison.num_wrong,
            "num_wrong": comparison.num_wrong,
        },
        "interrupted": measured.run.result.interrupted,
        **measured.run.result.summary(),
    }
