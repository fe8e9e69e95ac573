"""The rest of the ``chaos`` commands: options, and the table of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

import typer

Seconds = Annotated[float, typer.Option(min=1, help="Time during which workers are troubled.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two troubles.")]
Streams = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
NumInstances = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the requests, and of who is troubled.")]


def chaos(arguments: Sequence[str], model: str, *, seconds: float, every: float, streams: int, seed: int) -> None:
    """Run it and print the tally.

    Raises:
        ServingError: An answer is not that of the undisturbed run, or a process is left.
    """
    from mlsys_core.serving.instances.chaos import run_chaos

    show(run_chaos(arguments, model, seconds=seconds, every_s=every, streams=streams, seed=seed))


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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mlsys_core.errors import ServingError

    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in tally.rows():
        table.add_row(name, value)
    Console().print(table)
    if tally.num_wrong:
        raise ServingError(
            f"{tally.num_wrong} of {tally.num_answers} answers are not those of the undisturbed run, or processes are "
            "left"
        )
