"""The command ``mlsys orca chaos``: kill a server's processes while it answers, and compare what its clients get."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import Model
from mlsys_orca.loading.named import DEFAULT_MODEL
from mlsys_serving.cli.chaos import ChaosOut, Every, Process, Seconds, Seed, Streams, Trouble
from mlsys_serving.cli.chaos import chaos as run

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def chaos(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    seconds: Seconds = 60.0,
    every: Every = 2.0,
    streams: Streams = 32,
    trouble: Annotated[
        Trouble, typer.Option(help="kill, stop (it hangs), or abort (as if it had crashed).")
    ] = Trouble.KILL,
    who: Annotated[
        list[Process] | None, typer.Option(help="Kind of process that is troubled; repeat for several. Default: all.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(file_okay=False, metavar="DIR", help="The server's; clients then come back.")
    ] = None,
    seed: Seed = 0,
    out: ChaosOut = None,
) -> None:
    """Start a server, trouble its processes while it answers mixed requests, and compare with an undisturbed run.

    Requests are greedy, seeded, with several choices, log-probabilities, or a JSON schema. Every answer must be that of
    the undisturbed run, to the last digit: exit code 0 if all are, else 1. Without --journal, answers break off with
    the front that sends them, and are counted. All other options are those of mlsys orca serve; over a Ray cluster,
    ranks on this machine are troubled.

    A process that is stopped is missed only if it is a worker or a rank, so --trouble stop troubles no others.

    Example: mlsys orca chaos smollm2-135m-instruct --seconds 20 --every 2 --replicas 2
    """
    from mlsys_orca.cli.chaos_client import StreamClients

    arguments = ["orca", "serve", model, "--name", "model", *context.args]
    if journal is not None:
        arguments += ["--journal", str(journal)]
    chosen = [each.value for each in who or ([Process.WORKER] if trouble is Trouble.STOP else Process)]
    if trouble is Trouble.STOP and not {"worker", "rank"}.issuperset(chosen):
        raise InvalidInputError(
            "--trouble stop is for workers and ranks, which are missed: leave out --who, or take kill or abort"
        )
    run(
        arguments,
        "model",
        seconds=seconds,
        every=every,
        streams=streams,
        seed=seed,
        out=out,
        clients=StreamClients(streams, seed, come_back=journal is not None),
        trouble=trouble,
        kinds=chosen,
    )
