"""``mlsys nimble``: a model's schedule, printed, drawn, as JSON, or saved and run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import TrustCode
from mlsys_nimble.cli.explain import GraphFile, explain, nets

if TYPE_CHECKING:
    from mlsys_nimble.planning.streams import StreamAssignment, SyncEvent


_REPLAYS = 20


def save(
    model: Annotated[str, typer.Argument(help="As for mlsys nimble explain.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
    batch: Annotated[int, typer.Option(min=1, help="Examples in a call.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    trust_code: TrustCode = False,
) -> None:
    """Prepare a model, and write the schedule with its weights to one file that loads in milliseconds.

    Example: mlsys nimble save resnet20-cifar resnet20.nimble
    """
    from mlsys_core.memory.plan import format_nbytes
    from mlsys_nimble import Nimble
    from mlsys_nimble.nets.resolve import load_model

    net = load_model(model, batch=batch, trust_code=trust_code)
    nbytes = Nimble(net.module).prepare(net.inputs, num_threads=threads).save(file)
    typer.echo(f"wrote {file}: {format_nbytes(nbytes)}; run it with: mlsys nimble run {file}")


def run(
    file: Annotated[Path, typer.Argument(help="File that mlsys nimble save, or Nimble.save, wrote.")],
    threads: Annotated[int | None, typer.Option(min=1, help="Workers; as many as when it was saved.")] = None,
) -> None:
    """Load a saved model and replay it on zeros: what goes in, what comes out, and how long it takes.

    Example: mlsys nimble run resnet20.nimble
    """
    import statistics
    import time

    import torch
    from mlsys_nimble import load
    from torch.utils._pytree import tree_leaves

    begin = time.perf_counter()
    loaded = load(file, num_threads=threads)
    took_load = time.perf_counter() - begin
    for schedule in loaded.schedules:
        args, kwargs = schedule.arguments([torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in schedule.types])
        times: list[float] = []
        for _ in range(1 + _REPLAYS):
            begin = time.perf_counter()
            result = loaded(*args, **kwargs)
            times.append(time.perf_counter() - begin)
        made = [
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        ]
        typer.echo(f"{', '.join(map(str, schedule.types)) or 'nothing'} -> {', '.join(made)}")
        typer.echo(
            f"loaded in {took_load * 1e3:.1f} ms, first answer {times[0] * 1e3:.2f} ms, "
            f"then {statistics.median(times[1:]) * 1e3:.2f} ms on {schedule.executor.num_threads} threads"
        )


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
    from mlsys_nimble.planning.streams import assign_streams, plan_events

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
