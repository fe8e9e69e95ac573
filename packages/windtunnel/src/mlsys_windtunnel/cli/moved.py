"""``mlsys windtunnel moved``: what training or updates have moved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli.trust import TrustPickles
from mlsys_core.errors import InvalidInputError

MOST_LINES = 40


def moved(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that fine-tune or update wrote.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="MODEL", help="The model before; left out: the one in the folder."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the numbers before against after: svg, png or pdf.")
    ] = None,
    trust_code: TrustPickles = False,
) -> None:
    """Print which thresholds, leaves, scales, weights and categories of a model have moved, and how far.

    Example: mlsys windtunnel moved churn --picture moved.svg

    Example: mlsys windtunnel moved churn-january --from churn.skops
    """
    from mlsys_core.plot import check_format, save
    from mlsys_windtunnel.cli.fine_tune import loaded_module
    from mlsys_windtunnel.cli.update import START
    from mlsys_windtunnel.finetune.moved import draw_moved, what_moved
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if picture is not None:
        check_format(picture)
    before = source or model / START
    if source is None and not before.is_dir():
        raise InvalidInputError(f"{model} holds no pipeline of before: name it with --from")
    start = loaded_module(before, trust_code=trust_code)
    changes = what_moved(start, loaded_module(model, trust_code=trust_code))
    if not changes:
        typer.echo("nothing has moved: the answers are those of the pipeline as it was fitted")
        return
    table = Table("operator", "what", "of", box=SIMPLE, padding=(0, 1, 0, 0))
    for header in ("numbers", "moved", "mean", "largest"):
        table.add_column(header, justify="right", no_wrap=True)
    for change in changes[:MOST_LINES]:
        of = "" if change.column is None else f"column {change.column}"
        counts = (f"{len(change.before):,}", f"{change.num_moved:,}", f"{change.mean:.4g}", f"{change.largest:+.4g}")
        table.add_row(escape(change.operator), change.kind, of, *counts)
    console = Console()
    console.print(table)
    if len(changes) > MOST_LINES:
        console.print(f"and {len(changes) - MOST_LINES} more lines")
    if picture is not None:
        save(draw_moved(changes), picture)
        typer.echo(f"wrote {picture}", err=True)
