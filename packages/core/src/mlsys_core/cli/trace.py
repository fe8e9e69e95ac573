"""``mlsys trace``: read a recorder's file as a table, or write it in a registered exporter's format."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlsys_core.errors import InvalidInputError, PluginError

if TYPE_CHECKING:
    from rich.console import Console

    from mlsys_core.profiling.summary import RecordingSummary

app = typer.Typer(no_args_is_help=True)

TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A Chrome trace, .json or .json.gz.")]


class Sort(enum.StrEnum):
    """Columns to sort by, the largest first."""

    TOTAL = "total"
    COUNT = "count"
    P99 = "p99"


@app.callback()
def main() -> None:
    """Summarise and export trace files of mlsys and other tools; https://ui.perfetto.dev draws them.

    Example: mlsys trace summary run.json.gz
    """


@app.command()
def summary(
    file: TraceFile,
    sort: Annotated[Sort, typer.Option(help="Column to sort the spans by.")] = Sort.TOTAL,
    limit: Annotated[int, typer.Option(min=1, help="Number of span names to show.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, times in seconds.")] = False,
) -> None:
    """Show count, total, self time and percentiles of each span name.

    Example: mlsys trace summary run.json.gz --sort p99 --limit 10
    """
    from mlsys_core.profiling import read_trace, summarise_recording

    result = summarise_recording(read_trace(file), sort=sort.value)
    if as_json:
        document = result.to_dict()
        typer.echo(json.dumps({**document, "spans": document["spans"][:limit]}, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width to keep to
    _print(console, result, limit)


@app.command()
def export(
    file: TraceFile,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[str, typer.Option(metavar="NAME", help="An exporter: chrome-trace, or one of a plugin.")],
) -> None:
    """Write a trace in another format, by an exporter of the core or of a plugin.

    Example: mlsys trace export run.json --to chrome-trace run.json.gz
    """
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.registry import failing_as
    from mlsys_core.plugins.specs import ExporterSpec
    from mlsys_core.profiling import read_trace

    registry = installed_plugins().registry
    spec = registry.chosen(ExporterSpec, to)
    if output.resolve() == file.resolve():
        raise InvalidInputError(f"OUT {output} is the trace itself: name another file")
    recording = read_trace(file)
    with failing_as(spec, registry):
        try:
            registry.part(spec, passing=(OSError,))(recording, output)
        except OSError as error:
            if error.filename not in (None, str(output)):
                raise
            raise InvalidInputError(f"cannot write {output}: {error.strerror or error}; name another file") from error
    if not output.exists():
        raise PluginError(f"exporter {to!r} of {registry.owner(spec)} wrote no {output}")
    typer.echo(f"wrote {output}")


def _print(console: Console, result: RecordingSummary, limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from mlsys_core.profiling.summary import format_s

    console.print(
        f"events: {result.num_events} (instants: {result.num_instants}), wall time: {format_s(result.wall_s)}",
        highlight=False,
    )
    if result.dropped:
        console.print(Text(f"warning: {result.warning()}", style="yellow"))
    if result.spans:
        table = Table("span", title="spans", title_justify="left")
        for column in ("count", "total", "self", "mean", "p50", "p90", "p99", "max", "of wall"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in result.spans[:limit]:
            d = row.duration_s
            times = [format_s(value) for value in (d.total, row.self_s, d.mean, d.p50, d.p90, d.p99, d.max)]
            table.add_row(Text(row.name), str(d.count), *times, f"{row.share_of_wall:.1%}")
        console.print(table)
        if len(result.spans) > limit:
            console.print(f"and {len(result.spans) - limit} more span names: raise --limit", highlight=False)
    if result.counters:
        table = Table("counter", title="counters", title_justify="left")
        for column in ("process", "samples", "min", "mean", "max"):
            table.add_column(column, justify="right", no_wrap=True)
        for counter in result.counters:
            values = [f"{value:.6g}" for value in (counter.min, counter.mean, counter.max)]
            table.add_row(Text(counter.name), str(counter.pid), str(counter.num_samples), *values)
        console.print(table)
