"""``mlsys windtunnel translate``: a fitted pipeline to a module, shown, checked against its source and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.cli.options import TrustPickles
from mlsys_core.errors import InvalidInputError, MlsysError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from mlsys_windtunnel.module import WindTunnelModule
    from mlsys_windtunnel.parse.graph import Operator, PipelineGraph
    from rich.console import Console

TOLERANCE = 1e-6  # of answers in float64


def translate(
    pipeline_file: Annotated[Path, typer.Argument(metavar="PIPE", help="A fitted pipeline: .skops, .joblib or .pkl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write a folder of safetensors and JSON.")
    ] = None,
    pt2: Annotated[
        Path | None,
        typer.Option(metavar="FILE.pt2", help="Write a torch.export program that takes the packed table of encode()."),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE.onnx", help="Write an ONNX model that takes raw columns by name.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="The ONNX file takes the packed table of encode(), not raw columns.")
    ] = False,
    check: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Rows (csv, parquet) on which to compare with the source.")
    ] = None,
    example: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="A few rows; needed where a part does not tell its number of columns."),
    ] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Compute in float32: smaller, faster, less exact.")
    ] = False,
    trust_code: TrustPickles = False,
) -> None:
    """Translate a fitted pipeline into a trainable network that answers as it does.

    Prints each operator with where it runs: in the network (trainable), or on the host, and why. With --check all
    answers are compared with the source's, those of written files too; more than 1e-6 apart (in float64) is an error.

    Example: mlsys windtunnel translate churn.skops -o churn --check customers.parquet

    Example: mlsys windtunnel translate churn.joblib --trust-code --pt2 churn.pt2 --onnx churn.onnx
    """
    from mlsys_windtunnel.cli.data import check_table_path, load_pipeline, read_table
    from rich.console import Console

    for path in (check, example):
        if path is not None:
            check_table_path(path)
            if not path.is_file():
                raise InvalidInputError(f"{path} is not a file")
    _check_targets(output, pt2, onnx)
    source = load_pipeline(pipeline_file, trust_code=trust_code, then=lambda fitted: fitted)
    module, graph = _translated(source, None if example is None else read_table(example), float32=float32)
    print_operators(graph, module, Console())
    x = None
    if check is not None:
        frame = read_table(check, module.frontend)
        x = _rows_for(module, frame)
        _compare(source, module, x, limit=None if float32 else TOLERANCE, against="the source")
    rows = x if x is not None else None if example is None else read_table(example)
    for path, loaded in _write(module, output, pt2, onnx, columns=not packed, rows=rows):
        typer.echo(f"wrote {path}")
        if x is not None and loaded is not None:
            _compare(source, loaded, x, limit=None if float32 else TOLERANCE, against=f"the source, from {path.name}")


def _rows_for(module: WindTunnelModule, frame: pd.DataFrame) -> Any:
    """Return rows as the source was given them: by name, as texts, or as an array."""
    if module.frontend.columns is not None:
        return frame
    return frame.iloc[:, 0] if module.frontend.takes_rows and frame.shape[1] == 1 else frame.to_numpy()


def _check_targets(output: Path | None, pt2: Path | None, onnx: Path | None) -> None:
    if output is not None and output.exists() and not output.is_dir():
        raise InvalidInputError(f"{output} is a file; -o names a folder")
    for path, suffix in ((pt2, ".pt2"), (onnx, ".onnx")):
        if path is not None and path.suffix != suffix:
            raise InvalidInputError(f"{path}: the name must end in {suffix}")
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInputError(f"{path}: there is no folder {path.absolute().parent}")


def _translated(source: Any, rows: Any, *, float32: bool) -> tuple[WindTunnelModule, PipelineGraph]:
    import torch
    from mlsys_windtunnel.convert.translation import translate as translate_pipeline
    from mlsys_windtunnel.parse.pipeline import parse_pipeline

    module = translate_pipeline(source, rows, dtype=torch.float32 if float32 else torch.float64)
    return module, parse_pipeline(source)


def _write(
    module: WindTunnelModule, output: Path | None, pt2: Path | None, onnx: Path | None, *, columns: bool, rows: Any
) -> Iterator[tuple[Path, Any]]:
    """Write what is asked for; each with what can be loaded from it again, None if its host part is not in it."""
    from mlsys_windtunnel.export.program import default_methods

    methods = default_methods(module)
    if output is not None:
        from mlsys_windtunnel.export.artifact import load, save

        save(module, output)
        yield output, load(output)
    if pt2 is not None:
        from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2

        export_pt2(module, pt2, methods=methods)
        yield pt2, None if module.frontend.fallbacks else load_pt2(pt2)
    if onnx is not None:
        from mlsys_windtunnel.export.onnx import export_onnx, load_onnx

        export_onnx(module, onnx, methods=methods, columns=columns, X_example=rows)
        yield onnx, None if module.frontend.fallbacks else load_onnx(onnx)


def where_it_runs(graph: PipelineGraph, module: WindTunnelModule) -> dict[str, str]:
    """Return for each operator "network", or "host: " and why."""
    from mlsys_windtunnel.convert.registry import default_registry
    from mlsys_windtunnel.convert.translation import convert_operator
    from mlsys_windtunnel.parse.graph import Kind

    registry = default_registry()
    wires = {wire.name for wire in module.network.wires}
    readers: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        for value in operator.inputs:
            readers.setdefault(value.name, []).append(operator)
    coded = {name for value in module.frontend.frontier if value.lookup is not None for name in value.reads}

    def reason(operator: Operator) -> str:
        if operator.kind in (Kind.TRANSFORM, Kind.PREDICT):
            converted = convert_operator(operator, registry)
            if isinstance(converted, str):
                return converted
        on_host = [reader.name for reader in readers.get(operator.output.name, ()) if reader.output.name not in wires]
        if on_host:
            return f"{on_host[0]} reads it there"
        if operator.output.name in coded:
            return "its categories are looked up there"
        return "picks columns of the raw table"

    return {
        operator.name: "network" if operator.output.name in wires else f"host: {reason(operator)}"
        for operator in graph.operators
    }


def num_trainable(module: WindTunnelModule) -> dict[str, int]:
    """Return the number of trainable parameters of each operator in the network, by name."""
    return {
        wire.name: sum(parameter.numel() for parameter in part.parameters() if parameter.requires_grad)
        for wire, part in zip(module.network.wires, module.network.operators, strict=True)
    }


def print_operators(graph: PipelineGraph, module: WindTunnelModule, console: Console) -> None:
    """Print the pipeline as a table: each operator, what it reads, where it runs, and how much of it can be trained."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    placement, trainable = where_it_runs(graph, module), num_trainable(module)
    table = Table("#", "operator", "does", "reads", "runs", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.overflow = "fold"  # a name is there to be read whole
    table.add_column("trainable", justify="right", no_wrap=True)
    numbers = {graph.input.name: "0"}
    table.add_row("0", "input")
    for number, operator in enumerate(graph.operators, start=1):
        numbers[operator.output.name] = str(number)
        count = trainable.get(operator.output.name, 0)
        table.add_row(
            str(number),
            escape(operator.name),
            escape((operator.source or operator.kind.value).rpartition(".")[2]),
            ", ".join(numbers[value.name] for value in operator.inputs),
            escape(placement[operator.name]),
            f"{count:,}" if count else "",
        )
    in_network = sum(side == "network" for side in placement.values())
    console.print(table)
    console.print(
        f"{in_network} of {len(placement)} operators in the network, {sum(trainable.values()):,} trainable parameters",
        highlight=False,
    )


def differences(source: Any, answering: Any, x: Any) -> dict[str, tuple[float, int]]:
    """Return for each method of both the maximum |difference| and the number of rows whose labels differ.

    Raises:
        InvalidInputError: the source itself refuses ``x``.
        MlsysError: an answer has another shape than the source's.
    """
    import numpy as np
    from mlsys_windtunnel.module import METHODS
    from mlsys_windtunnel.parse.boosters import as_estimator

    source, found = as_estimator(source), {}
    for method in METHODS:
        if not hasattr(source, method) or not hasattr(answering, method):
            continue
        try:
            expected = getattr(source, method)(x)
        except Exception as error:  # third-party code
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInputError(
                f"the source itself does not answer {method} for these rows: {reason:.200}"
            ) from error
        got = getattr(answering, method)(x)
        if isinstance(expected, list):  # probabilities of several outputs
            expected, got = np.concatenate(expected, axis=1), np.concatenate(got, axis=1)
        expected = np.asarray(expected.toarray() if hasattr(expected, "toarray") else expected)
        if expected.shape != got.shape:
            raise MlsysError(f"{method} answers a table of shape {got.shape}; the source's is {expected.shape}")
        if expected.dtype.kind == "f" and got.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                apart = np.where(expected == got, 0.0, np.abs(expected - got))  # infinities are equal
            apart[np.isnan(expected) & np.isnan(got)] = 0.0
            found[method] = (float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)), 0)
        else:
            differs = np.asarray(expected != got)
            found[method] = (0.0, int(differs.reshape(len(differs), -1).any(axis=1).sum()))
    return found


def _compare(source: Any, answering: Any, x: Any, *, limit: float | None, against: str) -> None:
    """Print the differences.

    Raises:
        MlsysError: some are above ``limit``.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    found = differences(source, answering, x)
    table = Table("method", "max |difference|", "labels that differ", box=SIMPLE, padding=(0, 1, 0, 0))
    for method, (apart, labels) in found.items():
        table.add_row(method, f"{apart:.2g}", str(labels))
    console = Console()
    console.print(f"{len(x):,} rows against {against}:", highlight=False)
    console.print(table)
    wrong = [method for method, (apart, labels) in found.items() if limit is not None and (apart > limit or labels)]
    if wrong:
        raise MlsysError(f"{', '.join(wrong)} differ from {against} by more than {limit:g}; please report this")
