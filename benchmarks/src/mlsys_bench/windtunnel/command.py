"""``mlsys windtunnel bench``."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out, Quick, Threads, run_named
from mlsys_core.cli.options import Device

app = typer.Typer()


@app.command()
def bench(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]...",
            help="5.3 to 5.6, nearby, outside, ratings; all if none; coverage or public alone.",
        ),
    ] = None,
    datasets: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="NAME", help="Only this data set; may be given more than once."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Only rows of this model; may be given more than once.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="PRE", help="Only rows with these columns: pre1 to pre5; more than once."),
    ] = None,
    pipes: Annotated[
        list[str] | None,
        typer.Option("--pipe", metavar="PIPE", help="Only translations of these models: pipe1, pipe2, pipe3."),
    ] = None,
    quick: Quick = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...; the first chooses between candidates.")] = 5,
    rows: Annotated[int, typer.Option(min=0, help="Training rows of flights-3m; 0: all.")] = 0,
    valid_rows: Annotated[int, typer.Option(min=100, help="Validation rows of flights-3m.")] = 60_000,
    test_rows: Annotated[int, typer.Option(min=0, help="Test rows of flights-3m; 0: all.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Of every network.")] = 7,
    trees: Annotated[int, typer.Option(min=1, help="Of LightGBM in sources and DeepGBM; the paper has 100.")] = 100,
    threads: Threads = 1,
    device: Device = "cpu",
    out: Out = RESULTS,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the files.")] = "windtunnel-tables",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name the cells that would run first, run none.")] = False,
) -> None:
    """Run the experiments of the dissertation's section 5.4: tables 5.3 to 5.6, nearby, outside, ratings.

    ``coverage`` translates hundreds of fitted sources and compares the answers, beside skl2onnx and Hummingbird.
    ``public`` compares fine-tuning with the tuned source that it begins with on eight public sets.

    Each finished fit is a line of OUT/NAME.jsonl: the same command goes on where it was stopped. The report of all
    finished ones is OUT/NAME.html and NAME.json. XGBoost and CatBoost are run where they are installed. The suite is in
    mlsys-bench; in a checkout: pip install -e benchmarks.

    Example: mlsys windtunnel bench --quick -o /tmp/tables

    Example: mlsys windtunnel bench 5.4 --data flights-3m --rows 300000 --seeds 2
    """
    if tables == ["coverage"]:
        run_named("windtunnel-coverage", quick=quick, device=device, threads=threads, out=out)
        return
    if tables == ["public"]:
        sets = tuple(datasets or ())
        run_named("windtunnel-public", quick=quick, device=device, threads=threads, out=out, seeds=seeds, data=sets)
        return
    name = f"{name}-quick" if quick else name
    run_named(
        "windtunnel-tables",
        quick=quick,
        device=device,
        threads=threads,
        out=out,
        name=name,
        tables=tuple(tables or ()),
        data=tuple(datasets or ()),
        only=tuple(only or ()),
        columns=tuple(columns or ()),
        pipe=tuple(pipes or ()),
        seeds=seeds,
        rows=rows,
        valid_rows=valid_rows,
        test_rows=test_rows,
        epochs=epochs,
        trees=trees,
        journal=name,
        dry_run=dry_run,
    )
