"""The rest of ``mlsys dvabatch chaos`` and ``mlsys batchmaker chaos``: options, and the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Seconds = Annotated[float, typer.Option(min=1, help="Time during which workers are killed.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two deaths.")]
Streams = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
NumInstances = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the requests, and of who is killed.")]


def chaos(arguments: Sequence[str], model: str, *, seconds: float, every: float, streams: int, seed: int) -> None:
    """Run it and print the tally.

    Raises:
        ServingError: An answer is not that of the undisturbed run, or a process is left.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mlsys_core.errors import ServingError
    from mlsys_core.serving.instances.chaos import run_chaos

    tally = run_chaos(arguments, model, seconds=seconds, every_s=every, streams=streams, seed=seed)
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in tally.rows():
        table.add_row(name, value)
    Console().print(table)
    if tally.num_wrong:
        raise ServingError(f"{tally.num_wrong} of {tally.num_answers} answers are lost or wrong, or processes are left")
