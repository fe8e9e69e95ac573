"""``mlsys nimble save`` and ``run``: prepare a model into a file, and replay it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli.trust import TrustCode

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
