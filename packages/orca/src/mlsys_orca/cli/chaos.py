"""The command ``mlsys orca chaos``: kill a server's workers while it answers, and compare what its clients get."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from mlsys_orca.cli.options import Model, Replicas, ReplicaThreads, num_threads_of
from mlsys_orca.loading.named import DEFAULT_MODEL
from mlsys_serving.cli.chaos import Every, Seconds, Seed, Streams, show


class Trouble(Enum):
    """Ways to trouble a worker."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP: it hangs
    ABORT = "abort"  # SIGABRT: as if it had crashed
    RELOAD = "reload"  # no death: the whole server loads its model anew, and the next generation takes over


def chaos(
    model: Model = DEFAULT_MODEL,
    seconds: Seconds = 60.0,
    every: Every = 2.0,
    streams: Streams = 32,
    trouble: Annotated[
        Trouble, typer.Option(help="kill, stop (it hangs), abort (as if it had crashed), or reload (the server).")
    ] = (Trouble.KILL),
    threads: ReplicaThreads = 0,
    replicas: Replicas = 1,
    seed: Seed = 0,
) -> None:
    """Start a server, trouble its workers while it answers mixed requests, and compare with an undisturbed run.

    Requests are greedy, seeded, with several choices, log-probabilities, or a JSON schema. Every answer must be that of
    the undisturbed run, to the last digit: exit code 0 if all are, else 1.

    Example: mlsys orca chaos smollm2-135m-instruct --seconds 20 --every 2
    """
    import asyncio

    from mlsys_orca.cli.chaos_client import Chaos, running_server

    with running_server(model, num_threads_of(threads, replicas=replicas), replicas) as server:
        run = Chaos(server, streams=streams, seed=seed)
        tally = asyncio.run(run.run(seconds=seconds, every_s=every, trouble=trouble.value))
    show(tally)
