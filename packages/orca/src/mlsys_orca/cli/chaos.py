"""The command ``mlsys orca chaos``: kill a server's workers while it answers, and compare what its clients get."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from mlsys_core.errors import ServingError
from mlsys_orca.cli.options import Model, Replicas, ReplicaThreads, num_threads_of
from mlsys_orca.loading.named import DEFAULT_MODEL


class Trouble(Enum):
    """Ways to trouble a worker."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP: it hangs
    ABORT = "abort"  # SIGABRT: as if it had crashed
    RELOAD = "reload"  # no death: the whole server loads its model anew, and the next generation takes over


def chaos(
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(min=1, help="Time during which workers are troubled.")] = 60.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two troubles.")] = 2.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 32,
    trouble: Annotated[
        Trouble, typer.Option(help="kill, stop (it hangs), abort (as if it had crashed), or reload (the server).")
    ] = (Trouble.KILL),
    threads: ReplicaThreads = 0,
    replicas: Replicas = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the requests, and of who is troubled.")] = 0,
) -> None:
    """Start a server, trouble its workers while it answers mixed requests, and compare with an undisturbed run.

    Requests are greedy, seeded, with several choices, log-probabilities, or a JSON schema. Every answer must be that of
    the undisturbed run, to the last digit: exit code 0 if all are, else 1.

    Example: mlsys orca chaos smollm2-135m-instruct --seconds 20 --every 2
    """
    import asyncio

    from mlsys_orca.cli.chaos_client import Chaos, running_server
    from rich import box
    from rich.console import Console
    from rich.table import Table

    with running_server(model, num_threads_of(threads, replicas=replicas), replicas) as server:
        run = Chaos(server, streams=streams, seed=seed)
        tally = asyncio.run(run.run(seconds=seconds, every_s=every, trouble=trouble.value))
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in tally.rows():
        table.add_row(name, value)
    Console().print(table)
    if tally.num_wrong:
        raise ServingError(f"{tally.num_wrong} of {tally.num_answers} answers are not those of the undisturbed run")
