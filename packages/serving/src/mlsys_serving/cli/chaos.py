"""The rest of the ``chaos`` commands: options, and the table of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Protocol

import typer

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
) -> None:
    """Run it, print the tally, and write it with the environment to ``out`` / ``SUBSYSTEM-chaos.json``.

    Raises:
        ServingError: An answer is not that of the undisturbed run, or a process is left.
    """
    from mlsys_serving.instances.chaos import run_chaos

    tally = run_chaos(arguments, model, seconds=seconds, every_s=every, streams=streams, seed=seed)
    if out is not None:
        settings = {"model": model, "seconds": seconds, "every_s": every, "streams": streams, "seed": seed}
        _write(f"{arguments[0]}-chaos", {**settings, **asdict(tally)}, tally, out)
    show(tally)


def _write(name: str, data: dict[str, object], tally: Tally, out: Path) -> None:
    from mlsys_core.bench import BenchContext, write_results
    from mlsys_core.report import Section, Table
    from rich.console import Console

    section = Section("Workers killed under load", [Table(["", "number"], list(tally.rows()))], data=data)
    context = BenchContext(Console(), is_quick=False, device="cpu", num_threads=2, output_dir=out)
    write_results(name, section, context)


class Tally(Protocol):
    """Results of a run."""

    @property
    def num_answers(self) -> int:
        """Answers that were asked for."""
        ...

    @property
    def num_wrong(self) -> int:
        """Answers that are not those of the undisturbed run, and processes that are left."""
        ...

    def rows(self) -> Iterable[tuple[str, str]]:
        """Return names and values."""
        ...


def show(tally: Tally) -> None:
    """Print a tally.

    Raises:
        ServingError: Something of it is wrong.
    """
    from mlsys_core.errors import ServingError
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in tally.rows():
        table.add_row(name, value)
    Console().print(table)
    if tally.num_wrong:
        raise ServingError(
            f"{tally.num_wrong} of {tally.num_answers} answers are not those of the undisturbed run, or processes are "
            "left"
        )
