"""The rest of the ``chaos`` commands: options, and the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlsys_serving.instances.chaos import ChaosTally, Clients


class Trouble(Enum):
    """Ways to trouble a worker, by the names of ``mlsys_serving.instances.chaos.TROUBLES``."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP: it hangs
    ABORT = "abort"  # SIGABRT: as if it had crashed


class Process(Enum):
    """Kinds of a server's processes."""

    WORKER = "worker"  # or a standby
    FRONT = "front"
    RANK = "rank"  # of a divided model
    SUPERVISOR = "supervisor"  # and so the whole server, which is started again


Seconds = Annotated[float, typer.Option(min=1, help="Time during which workers are troubled.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two troubles.")]
Streams = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
NumInstances = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
ChaosOut = Annotated[
    Path | None,
    typer.Option("--out", "--output", "-o", file_okay=False, help="Folder for the tally as JSON and a page."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the requests, and of who is troubled.")]


def chaos(
    arguments: Sequence[str],
    model: str,
    *,
    seconds: float,
    every: float,
    streams: int,
    seed: int,
    out: Path | None = None,
    clients: Clients | None = None,
    trouble: Trouble = Trouble.KILL,
    kinds: Sequence[str] = ("worker",),
) -> None:
    """Run it, print the tally, and write it with the environment to ``out`` / ``SUBSYSTEM-chaos.json``.

    Args:
        arguments: Of the ``mlsys`` that serves.
        model: Its name on the wire.
        seconds: Time during which workers are troubled.
        every: Seconds between two troubles.
        streams: Requests at a time.
        seed: Of the requests, and of who is troubled.
        out: A folder; None: nothing is written.
        clients: The system's; None: those of a model behind the Open Inference Protocol.
        trouble: What happens to processes.
        kinds: Kinds of processes that it happens to: values of :class:`Process`.

    Raises:
        ServingError: An answer is not that of the undisturbed run, or a process is left.
    """
    from mlsys_core.errors import ServingError

    from mlsys_serving.instances.chaos import ModelClients, run_chaos

    asked = ModelClients(model, seed) if clients is None else clients
    tally = run_chaos(
        arguments,
        asked,
        seconds=seconds,
        every_s=every,
        streams=streams,
        seed=seed,
        trouble=trouble.value,
        kinds=kinds,
    )
    if out is not None:
        settings = {"model": model, "seconds": seconds, "every_s": every, "streams": streams, "seed": seed}
        _write(f"{arguments[0]}-chaos", {**settings, **asdict(tally)}, tally, out)
    _show(tally)
    if tally.num_wrong:
        raise ServingError(
            f"{tally.num_wrong} of {tally.num_answers} answers are not those of the undisturbed run, or processes are "
            "left"
        )


def _write(name: str, data: dict[str, object], tally: ChaosTally, out: Path) -> None:
    from mlsys_core.bench import BenchContext, write_results
    from mlsys_core.report import Section, Table
    from rich.console import Console

    section = Section("Processes killed under load", [Table(["", "number"], list(tally.rows()))], data=data)
    context = BenchContext(Console(), is_quick=False, device="cpu", num_threads=2, output_dir=out)
    write_results(name, section, context)


def _show(tally: ChaosTally) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in tally.rows():
        table.add_row(name, value)
    Console().print(table)
