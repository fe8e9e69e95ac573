"""``mlsys dvabatch bench``."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out, Quick, run_named
from mlsys_core.cli.options import Device, require_choice, require_read

app = typer.Typer()


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="paper: its figures; embeddings: texts beside peers.")] = "paper",
    quick: Quick = False,
    part: Annotated[str, typer.Option(help="all, encoder, vision or stepping.")] = "all",
    lengths: Annotated[str, typer.Option(help="The encoder's texts: RTE,SST-2; see the docs.")] = "",
    threads: Annotated[int, typer.Option(help="embeddings: cores of each contestant.", min=1, max=1024)] = 2,
    device: Device = "cpu",
    out: Out = RESULTS,
) -> None:
    """Reproduce the paper's Figures 14 to 21, or embed texts beside other libraries.

    The suite is in mlsys-bench; in a checkout: pip install -e benchmarks.

    Example: mlsys dvabatch bench --quick

    Example: mlsys dvabatch bench embeddings --lengths RTE,SST-2
    """
    require_choice("benchmark", what, "paper", "embeddings")
    require_read("the benchmark", what, "paper", part=part != "all")
    require_read("the benchmark", what, "embeddings", threads=threads != 2)
    names = tuple(name.strip() for name in lengths.split(",") if name.strip())
    if what == "embeddings":
        run_named("dvabatch-embeddings", quick=quick, device=device, threads=threads, out=out, lengths=names)
        return
    run_named("dvabatch", quick=quick, device=device, threads=1, out=out, part=part, lengths=names)
