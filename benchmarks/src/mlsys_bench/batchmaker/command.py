"""``mlsys batchmaker bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out, Quick, run_named
from mlsys_core.cli.options import Device, require_choice, require_read

app = typer.Typer()
FIGURES = "3,7,8,9,11,13,14,15"


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="paper: the paper's figures; voice: live voices.")] = "paper",
    quick: Quick = False,
    figures: Annotated[str, typer.Option(help="Figures of the paper, with commas.", metavar="NUMBERS")] = FIGURES,
    hidden: Annotated[int, typer.Option(help="Hidden size; 0: 1024, quick 256.", min=0)] = 0,
    requests: Annotated[int, typer.Option(help="Requests a run; 0: 1000, quick 120.", min=0)] = 0,
    trees: Annotated[Path | None, typer.Option(help="Parse trees in brackets, one a line, for figure 14.")] = None,
    streams: Annotated[int, typer.Option(help="voice: live streams of the last comparison.", min=1)] = 1000,
    device: Device = "cpu",
    out: Out = RESULTS,
) -> None:
    """Reproduce the paper's figures, or let a thousand voices speak: cellular batching against its baselines.

    The suite is in mlsys-bench; in a checkout: pip install -e benchmarks.

    Example: mlsys batchmaker bench --quick --figures 7,9

    Example: mlsys batchmaker bench voice --streams 1000
    """
    require_choice("benchmark", what, "paper", "voice")
    require_read("the benchmark", what, "voice", streams=streams != 1000)
    of_paper = {"figures": figures != FIGURES, "hidden": bool(hidden), "requests": bool(requests), "trees": bool(trees)}
    require_read("the benchmark", what, "paper", **of_paper)
    if what == "voice":
        run_named("batchmaker-voice", quick=quick, device=device, threads=2, out=out, streams=streams)
        return
    run_named(
        "batchmaker",
        quick=quick,
        device=device,
        threads=1,
        out=out,
        figures=tuple(part.strip() for part in figures.split(",")),
        hidden=hidden,
        requests=requests,
        trees="" if trees is None else str(trees),
    )
