"""``mlsys nimble bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli.registered import Device
from mlsys_core.cli.trust import TrustCode


def bench(
    nets: Annotated[
        str, typer.Option(help="Only these, by comma; names of mlsys nimble nets, or what explain takes.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="Five small nets, none that compiles for minutes; under 3 min.")] = False,
    peers: Annotated[
        Path | None,
        typer.Option(help="An environment with the peers (benchmarks/peers/nimble); .peers/nimble if it is there."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each contestant.")] = 2,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for the JSON, the page and the plot.")] = Path(
        "benchmarks/results"
    ),
    trust_code: TrustCode = False,
) -> None:
    """Time Nimble against eager, torch.compile, AOTInductor, ONNX Runtime and OpenVINO on chapter 3's nets.

    All contestants of a net take turns in one process, with the same number of threads; results are compared before
    times. A peer that is not installed is named. The machine should have nothing else to do.

    Example: mlsys nimble bench --nets darts,nasnet-mobile --threads 2
    """
    from mlsys_core.bench import BenchContext, print_section, write_results
    from mlsys_core.device import device_kind
    from mlsys_core.errors import InvalidInputError
    from mlsys_nimble.bench.suite import run, run_nets
    from rich.console import Console

    console = Console()
    context = BenchContext(console, quick, device, threads)
    wanted = [name.strip() for name in nets.split(",") if name.strip()]
    if device_kind(device).name == "cpu":
        section = run_nets(context, nets=wanted, peers=peers, trust_code=trust_code)
    elif wanted or peers is not None:
        raise InvalidInputError(f"on {device} the paper's nets are run, with what torch has: no --nets, no --peers")
    else:
        section = run(context)
    print_section(section, console)
    for path in write_results("nimble", section, context, output):
        console.print(f"wrote {path}", markup=False)
    if section.status == "failed":
        raise typer.Exit(1)
