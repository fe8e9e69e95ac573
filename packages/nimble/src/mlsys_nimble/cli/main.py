"""``mlsys nimble``: a model's schedule, printed, drawn or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_nimble.cli.explain import explain, nets
from mlsys_nimble.cli.graph import GraphFile
from mlsys_nimble.cli.saved import run, save

if TYPE_CHECKING:
    from mlsys_nimble.planning.streams import StreamAssignment
    from mlsys_nimble.planning.sync import SyncEvent

app = typer.Typer(no_args_is_help=True)
app.command()(nets)
app.command()(explain)
app.command()(save)
app.command()(run)

_STREAMS_SHOWN = 20


@app.callback()
def nimble() -> None:
    """Schedule a model ahead of time: which operator runs on which stream, and where streams wait for each other."""


@app.command()
def streams(
    graph_file: Annotated[
        Path, typer.Argument(metavar="GRAPH", help='JSON: {"nodes": ["a", "b"], "edges": [["a", "b"]]}.')
    ],
    graph: GraphFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Assign the operators of a graph to streams: all the concurrency there is, with the fewest synchronisations.

    Example: mlsys nimble streams block.json --graph block.svg
    """
    from mlsys_core.graphs import write_graph
    from mlsys_nimble.ir.graph import read_graph
    from mlsys_nimble.planning.streams import assign_streams
    from mlsys_nimble.planning.sync import plan_events

    assignment = assign_streams(read_graph(graph_file))
    events = plan_events(assignment)
    if graph is not None:
        write_graph(assignment.to_networkx(), graph)
    if as_json:
        _print_json(assignment, events)
    else:
        _print_tables(assignment)
        if graph is not None:
            typer.echo(f"wrote {graph}")


def _print_json(assignment: StreamAssignment, events: tuple[SyncEvent, ...]) -> None:
    import json

    names = assignment.graph.names
    report = {
        "nodes": len(names),
        "edges": len(assignment.graph.edges),
        "meg_edges": len(assignment.meg_edges),
        "degree_of_logical_concurrency": assignment.degree,
        "streams": [[names[operator] for operator in stream] for stream in assignment.streams()],
        "synchronizations": [[names[event.producer], names[event.consumer]] for event in events],
    }
    typer.echo(json.dumps(report, indent=1))


def _print_tables(assignment: StreamAssignment) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    names = assignment.graph.names
    num_edges, num_matched = len(assignment.meg_edges), len(assignment.matching)
    console = Console()
    summary = Table(show_header=False)
    summary.add_row("nodes", str(len(names)))
    summary.add_row("edges", str(len(assignment.graph.edges)))
    summary.add_row("edges of the minimum equivalent graph", str(num_edges))
    summary.add_row("degree of logical concurrency", str(assignment.degree))
    summary.add_row("streams", str(assignment.num_streams))
    summary.add_row("synchronisations, |E'| - |M|", f"{num_edges - num_matched} = {num_edges} - {num_matched}")
    console.print(summary)
    members = Table("stream", "operators, in order")
    for stream, operators in enumerate(assignment.streams()[:_STREAMS_SHOWN]):
        members.add_row(str(stream), escape(", ".join(names[operator] for operator in operators)))
    console.print(members)
    if assignment.num_streams > _STREAMS_SHOWN:
        console.print(f"... and {assignment.num_streams - _STREAMS_SHOWN} more streams; --json lists them all")
