"""The measurements of :mod:`.policies` as a report: a table, a figure, and the numbers for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Figure, Section, Table

if TYPE_CHECKING:
    from mlsys_core.workload import LatencySummary
    from mlsys_orca.loading.loaded import LoadedModel

    from mlsys_bench.harness.machine import Load
    from mlsys_bench.orca.policies import Measurement, Plan

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
