"""Results for readers: rich tables, the warnings that belong beside them, and a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mlsys_core.workload import LatencySummary

from mlsys_bench.workload.loadgen import LoadProgress
from mlsys_bench.workload.results import LatencyBounds, LoadResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_METRICS = {  # attribute of LoadResult -> its name for people
    "latency": "latency (ms)",
    "ttft": "time to first token (ms)",
    "itl": "between tokens (ms)",
    "normalized_latency": "latency per token (ms)",
    "lateness": "generator lateness (ms)",
}
# Lateness is large when it shows in the latencies; never below what sleeping costs, always where it bends the arrivals.
_LATENESS_SHARE = 0.05  # of the median latency
_LATENESS_FLOOR_S = 0.002
_LATENESS_CEILING_S = 0.05


def result_table(result: LoadResult) -> Table:
    """Return a table of one run's distributions; columns are mean and percentiles, cells milliseconds."""
    from rich import box
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for attribute, label in _METRICS.items():
        summary: LatencySummary | None = getattr(result, attribute)
        if summary is not None:
            row = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
            table.add_row(label, *map(_milliseconds, row))
    return table


def comparison_table(results: Sequence[LoadResult], *, bounds: LatencyBounds | None = None) -> Table:
    """Return a table with one row per run.

    Columns: load, throughput, median and tail latencies, failures, and goodput if ``bounds`` are given.
    """
    from rich import box
    from rich.table import Table

    headings = [
        "offered\nreq/s",
        "done\nreq/s",
        "\ntokens/s",
        "p50\nms",
        "p99\nms",
        "TTFT\np50 ms",
        "ms per\ntoken",
        "\nfailed",
    ]
    headings += ["good-\nput", "good\nreq/s"] if bounds else []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("\nrun", overflow="fold", min_width=9)  # the one to give way in a narrow terminal
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        offered = "closed" if result.closed_loop else _number(result.offered_rps)
        latency, ttft, normalized = result.latency, result.ttft, result.normalized_latency
        row = [
            result.name,
            offered,
            _number(result.throughput_rps),
            _number(result.throughput_tokens_per_s),
            _milliseconds(latency.p50 if latency else None),
            _milliseconds(latency.p99 if latency else None),
            _milliseconds(ttft.p50 if ttft else None),
            _milliseconds(normalized.p50 if normalized else None),
            str(sum(result.errors.values())),
        ]
        if bounds is not None:
            goodput = result.goodput(bounds)
            row += [f"{goodput.share:.1%}", _number(goodput.rps)]
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.4g}"


def warnings_of(result: LoadResult) -> list[str]:
    """Return cautions for readers of ``result``: one sentence each, none if nothing is amiss."""
    warnings = []
    if result.interrupted:
        warnings.append(f"the run was interrupted after {len(result.records)} of {result.num_planned} requests")
    num_records = len(result.records)
    for kind, count in result.errors.items():
        detail = next(record.detail for record in result.records if record.error == kind)
        warnings.append(f"{count} of {num_records} requests failed: {kind}{f' ({detail})' if detail else ''}")
    failed_warmup = [record for record in result.warmup if not record.ok]
    if failed_warmup:
        first = failed_warmup[0].error
        warnings.append(f"{len(failed_warmup)} of {len(result.warmup)} warm-up requests failed, the first with {first}")
    if result.num_generator_limited:
        warnings.append(
            f"{result.num_generator_limited} of {num_records} requests were limited by the generator: "
            f"all {result.max_connections} connections were taken when they were due"
        )
    lateness, latency = result.lateness, result.latency
    if lateness is not None:
        share_s = _LATENESS_SHARE * latency.p50 if latency is not None else 0.0
        if lateness.p99 > min(max(_LATENESS_FLOOR_S, share_s), _LATENESS_CEILING_S):
            warnings.append(
                f"the generator itself was late: p99 {_milliseconds(lateness.p99)} ms, counted in the latencies; "
                "the machine is too busy, or the rate too high for one generator"
            )
    num_short = sum(
        record.num_output_tokens < record.num_planned_tokens
        for record in result.successes
        if record.num_output_tokens is not None
    )
    if num_short:
        warnings.append(f"{num_short} of {num_records} answers have fewer tokens than the trace asks for")
    return warnings


@contextlib.contextmanager
def progress_bar(console: Console, description: str) -> Iterator[Callable[[LoadProgress], None]]:
    """Show a progress bar on ``console`` within the context; pass the yielded function as ``on_progress``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[outstanding]} outstanding, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=None, outstanding=0, failed=0)

        def show(state: LoadProgress) -> None:
            outstanding = max(0, state.num_sent - state.num_done)  # some may end without having been sent
            progress.update(task, total=state.num_planned, completed=state.num_done)
            progress.update(task, outstanding=outstanding, failed=state.num_failed)

        yield show
