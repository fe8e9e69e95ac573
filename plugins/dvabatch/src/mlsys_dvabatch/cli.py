"""``mlsys dvabatch``: batching policies in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlsys_dvabatch.baselines import BaselineResult
    from mlsys_dvabatch.stages import StagedModel

app = typer.Typer(no_args_is_help=True)


@app.callback()
def dvabatch() -> None:
    """Batch DNN requests so that they can join and leave a batch between the stages of the model."""


@app.command()
def baselines(
    stage_ms: Annotated[
        str,
        typer.Option(help="What a batch costs in each stage, milliseconds: FIXED+PER_REQUEST,...", metavar="STAGES"),
    ] = "4+0.5,4+0.5",
    load: Annotated[
        str, typer.Option(help="Offered loads, as parts of the peak throughput, with commas.", metavar="LOADS")
    ] = "0.25,0.6,0.9",
    window_ms: Annotated[float | None, typer.Option(help="Window of DelayBatch; searched by default.", min=0)] = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch.", min=1, max=4096)] = 64,
    requests: Annotated[int, typer.Option(help="Requests of each run.", min=2, max=1_000_000)] = 4000,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load (.svg, .png, .pdf).")] = None,
) -> None:
    """Simulate the request-level baselines (ZeroBatch, DelayBatch, static batch) under Poisson arrivals.

    Example: mlsys dvabatch baselines --stage-ms 4+0.5,4+0.5 --load 0.25,0.6,0.9 --plot baselines.svg
    """
    from mlsys_core.plot import check_format, latency_vs_load, save
    from rich.console import Console
    from rich.progress import Progress

    from mlsys_dvabatch.baselines import Workload, compare_baselines
    from mlsys_dvabatch.stages import parse_stages

    if plot is not None:
        check_format(plot)
    model, loads = parse_stages(stage_ms), parse_loads(load)
    workload = Workload(max_batch_size=max_batch, num_requests=requests, seed=seed)
    window_s = None if window_ms is None else window_ms / 1e3
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(loads))
        results = compare_baselines(
            model, loads, workload=workload, window_s=window_s, progress=lambda: bar.advance(task)
        )
    if plot is not None:
        policies = dict.fromkeys(result.policy for result in results)
        curves = {policy: [result.point for result in results if result.policy == policy] for policy in policies}
        save(latency_vs_load(curves, title=f"Stages of {stage_ms} ms, batches of at most {max_batch}"), plot)
    if as_json:
        _print_json(results, model, workload=workload)
    else:
        _print_table(results, model, max_batch=max_batch)
        if plot is not None:
            typer.echo(f"wrote {plot}")


def parse_loads(text: str) -> list[float]:
    """Loads from "0.25,0.6"; that they are parts of the peak is for the comparison to check.

    Raises:
        InvalidInputError: a part is no number.
    """
    from mlsys_core.errors import InvalidInputError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--load {text!r}: write numbers with commas, like 0.25,0.6") from None


def _print_json(results: list[BaselineResult], model: StagedModel, *, workload: object) -> None:
    import json
    from dataclasses import asdict

    from mlsys_core.environment import describe_environment

    report = {
        "model": asdict(model),
        "workload": {name: getattr(workload, name) for name in ("max_batch_size", "num_requests", "seed")},
        "results": [asdict(result) for result in results],
        "environment": describe_environment(),
    }
    typer.echo(json.dumps(report, indent=1))


def _print_table(results: list[BaselineResult], model: StagedModel, *, max_batch: int) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table("load", "policy", "tuned", box=SIMPLE, padding=(0, 1, 0, 0))
    for header in ("batch", "average (ms)", "p99 (ms)", "req/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        latency = result.point.latency
        table.add_row(
            f"{result.load:g}",
            result.policy,
            result.setting,
            f"{result.mean_batch_size:.1f}",
            f"{latency.mean * 1e3:.2f}",
            f"{latency.p99 * 1e3:.2f}",
            f"{result.point.throughput_rps:,.1f}",
            end_section=result.policy == results[-1].policy,
        )
    console = Console()
    console.print(table)
    seconds = model.seconds(max_batch)
    console.print(f"Peak {model.peak_rps(max_batch):,.1f} req/s: batches of {max_batch}, {seconds * 1e3:g} ms each")
