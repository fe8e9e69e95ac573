"""``mlsys windtunnel inspect``: a fitted pipeline as a graph of operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import GraphFile, TrustPickles

if TYPE_CHECKING:
    from mlsys_windtunnel.parse.graph import Operator, PipelineGraph, Value


def inspect(
    pipeline_file: Annotated[Path, typer.Argument(metavar="PIPE", help="A fitted pipeline: .skops, .joblib or .pkl.")],
    trust_code: TrustPickles = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    graph_file: GraphFile = None,
) -> None:
    """Print a fitted pipeline as a graph of operators: inputs, outputs and columns.

    Example: mlsys windtunnel inspect churn.skops

    Example: mlsys windtunnel inspect churn.skops --graph churn.graphml
    """
    from mlsys_windtunnel.cli.data import load_pipeline
    from mlsys_windtunnel.parse.pipeline import parse_pipeline

    graph = load_pipeline(pipeline_file, trust_code=trust_code, then=parse_pipeline)
    if graph_file is not None:
        from mlsys_core.graphs import write_graph

        write_graph(graph.to_networkx(), graph_file)
        typer.echo(f"wrote {graph_file}", err=True)
    if as_json:
        _print_json(graph)
    else:
        _print_table(graph)


def _print_json(graph: PipelineGraph) -> None:
    import json

    def fields(operator: Operator) -> dict[str, object]:
        return {
            "name": operator.name,
            "kind": operator.kind.value,
            "source": operator.source,
            "inputs": [value.name for value in operator.inputs],
            "width": operator.output.width,
            "columns": operator.columns,
            "weight": operator.weight,
            "methods": operator.methods,
        }

    report = {
        "input": {"width": graph.input.width, "columns": graph.columns},
        "operators": [fields(operator) for operator in graph.operators],
        "output": graph.output.name,
    }
    typer.echo(json.dumps(report, indent=1))


def _print_table(graph: PipelineGraph) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def width(value: Value) -> str:
        return "?" if value.width is None else f"{value.width:,}"

    def does(operator: Operator) -> str:
        name = (operator.source or operator.kind.value).rpartition(".")[2]
        return f"{name}: {', '.join(operator.methods)}" if operator.methods else name

    table = Table("#", "operator", "does", "reads", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.overflow = "fold"  # a name is there to be read whole
    table.add_column("columns", justify="right", no_wrap=True)
    table.add_row("0", "input", "", "", width(graph.input))
    numbers = {graph.input.name: "0"}
    for number, operator in enumerate(graph.operators, start=1):
        numbers[operator.output.name] = str(number)
        table.add_row(
            str(number),
            escape(operator.name),
            escape(does(operator)),
            ", ".join(numbers[value.name] for value in operator.inputs),
            width(operator.output),
        )
    console = Console()
    console.print(table)
    console.print(f"{len(graph.operators)} operator{'' if len(graph.operators) == 1 else 's'}")
