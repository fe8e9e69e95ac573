"""``mlsys nimble bench``."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.bench import RESULTS, Out, Quick, Threads, run_named
from mlsys_core.cli.options import Device, TrustCode
from mlsys_core.errors import InvalidInputError

app = typer.Typer()


@app.command()
def bench(
    nets: Annotated[
        str, typer.Option(help="Only these, by comma; names of mlsys nimble nets, or what explain takes.")
    ] = "",
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="One preparation at many sizes, beside peers with dynamic axes.")
    ] = False,
    zoo: Annotated[
        bool, typer.Option("--zoo", help="Fifty nets of torchvision, timm and others, alone and in company.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantised nets beside ONNX Runtime's and OpenVINO's int8, with accuracy.")
    ] = False,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Nets in bf16 beside torch's, OpenVINO's and ONNX Runtime's, with errors.")
    ] = False,
    quick: Quick = False,
    peers: Annotated[
        str | None,
        typer.Option(help="An environment with the peers (benchmarks/peers/nimble); .peers/nimble if it is there."),
    ] = None,
    threads: Threads = 2,
    device: Device = "cpu",
    out: Out = RESULTS,
    trust_code: TrustCode = False,
) -> None:
    """Time Nimble against eager, torch.compile, AOTInductor, ONNX Runtime and OpenVINO on chapter 3's nets.

    All cases of a net take turns in one process, with the same number of threads; results are compared before times. A
    peer that is not installed is named. The machine should have nothing else to do. The suite is in mlsys-bench; in a
    checkout: pip install -e benchmarks. With --dynamic one preparation serves sentences of 1 to 512 tokens or 1 to 64
    images. With --zoo nets that nobody tuned for are timed, alone and beside a busy process a core. With --int8 nets
    that torchao, ONNX Runtime and NNCF quantise are timed, and compared with each library's own float32. With --bf16
    nets are timed in bf16, and compared with eager float32.

    Example: mlsys nimble bench --nets darts,nasnet-mobile --threads 2
    """
    asked = {"zoo": zoo, "dynamic": dynamic, "int8": int8, "bf16": bf16}
    if sum(asked.values()) > 1:
        names = " and ".join(f"--{name}" for name, is_asked in asked.items() if is_asked)
        raise InvalidInputError(f"{names}: give one of them at a time")
    run_named(
        next((f"nimble-{name}" for name, is_asked in asked.items() if is_asked), "nimble"),
        quick=quick,
        device=device,
        threads=threads,
        out=out,
        nets=tuple(name.strip() for name in nets.split(",") if name.strip()),
        peers=peers,
        trust_code=trust_code,
    )
