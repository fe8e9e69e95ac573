"""Report of ``mlsys batchmaker knee``: a table, or JSON."""

from __future__ import annotations

import json

import typer
from mlsys_core.environment import describe_environment
from mlsys_core.profiling.profile_table import ProfileTable
from rich.console import Console
from rich.table import Table

_BUSY = 0.5  # (slowest - fastest) / median of the repeats; a quiet machine stays below


def print_json(table: ProfileTable, b_max: int, *, hidden: int, num_threads: int) -> None:
    """Print the measurement as JSON, with the machine beside it."""
    report = {
        "hidden_size": hidden,
        "num_threads": num_threads,
        "b_max": b_max,
        "table": json.loads(table.to_json()),
        "environment": describe_environment(),
    }
    typer.echo(json.dumps(report, indent=1))


def print_table(table: ProfileTable, b_max: int, *, fraction: float) -> None:
    """Print the measurement as a table, with the knee marked."""
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
