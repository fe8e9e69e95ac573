"""``mlsys batchmaker``: measure cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlsys_core.profiling.profile_table import ProfileTable

app = typer.Typer(no_args_is_help=True)

_BUSY = 0.5  # (slowest - fastest) / median of the repeats; a quiet machine stays below


@app.callback()
def batchmaker() -> None:
    """Serve recurrent networks by batching single cells instead of whole requests."""


@app.command()
def knee(
    hidden: Annotated[int, typer.Option(help="Hidden size of the LSTM cell.", min=1)] = 1024,
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes to measure, rising, with commas.", metavar="SIZES")
    ] = "1,2,4,8,16,32,64,128,256,512,1024,2048",
    threads: Annotated[int | None, typer.Option(help="Threads; all cores by default.", min=1)] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each batch size; the median counts.", min=1)] = 5,
    fraction: Annotated[
        float, typer.Option(help="The knee is the smallest batch size with this part of the best throughput.")
    ] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against throughput (.svg, .png, .pdf).")] = None,
) -> None:
    """Measure an LSTM cell over batch sizes, and find the one beyond which larger batches gain little.

    Example: mlsys batchmaker knee --hidden 1024 --threads 2 --plot knee.svg
    """
    from mlsys_core.errors import InvalidInputError
    from mlsys_core.plot import check_format, save
    from rich.console import Console
    from rich.progress import Progress

    if plot is not None:
        check_format(plot)
    if not 0 < fraction <= 1:
        raise InvalidInputError(f"--fraction {fraction}: must be above 0 and at most 1")
    sizes = parse_sizes(batch_sizes)

    from mlsys_batchmaker.knee import UNIT, knee_figure, profile_lstm_cell

    num_threads = threads or _num_cores()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        table = profile_lstm_cell(
            hidden,
            sizes,
            num_threads=num_threads,
            repeats=repeats,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    b_max = table.knee(UNIT, fraction=fraction)
    if plot is not None:
        save(knee_figure(table, b_max, title=f"LSTM cell, h = {hidden}, threads: {num_threads}"), plot)
    if as_json:
        _print_json(table, b_max, hidden=hidden, num_threads=num_threads)
    else:
        _print_table(table, b_max, fraction=fraction)
        if plot is not None:
            typer.echo(f"wrote {plot}")


def parse_sizes(text: str) -> list[int]:
    """Batch sizes from "1,2,4"; that they rise is for the profiler to check.

    Raises:
        InvalidInputError: a part is no whole number.
    """
    from mlsys_core.errors import InvalidInputError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--batch-sizes {text!r}: write whole numbers with commas, like 1,2,4") from None


def _num_cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_json(table: ProfileTable, b_max: int, *, hidden: int, num_threads: int) -> None:
    import json

    from mlsys_core.environment import describe_environment

    report = {
        "hidden_size": hidden,
        "num_threads": num_threads,
        "b_max": b_max,
        "table": json.loads(table.to_json()),
        "environment": describe_environment(),
    }
    typer.echo(json.dumps(report, indent=1))


def _print_table(table: ProfileTable, b_max: int, *, fraction: float) -> None:
    from rich.console import Console
    from rich.table import Table

    (profile,) = table.units
    console = Console()
    rows = Table("batch size", "latency (ms)", "spread", "throughput (cells/s)", "")
    for column in rows.columns[:4]:
        column.justify = "right"
    for size, seconds, spread in zip(profile.batch_sizes, profile.seconds, profile.spread, strict=True):
        rate = f"{size / seconds:,.0f}"
        rows.add_row(str(size), f"{seconds * 1e3:.3f}", f"{spread:.0%}", rate, "<- b_max" if size == b_max else "")
    console.print(rows)
    console.print(f"b_max = {b_max}: the smallest batch size with {fraction:.0%} of the best throughput")
    if b_max == profile.batch_sizes[-1]:
        console.print("It is the largest one measured: throughput may rise further, so give larger --batch-sizes")
    if max(profile.spread) > _BUSY:
        console.print(
            "The repeats differ widely: the machine is busy. Measure again when it is quiet, or with more --repeats"
        )
