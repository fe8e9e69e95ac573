"""``mlsys windtunnel update``: a model in use, brought up to date with new labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import Device, TrustPickles
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_windtunnel.finetune.update import Memory
    from mlsys_windtunnel.module import WindTunnelModule

START, MEMORY = "start", "memory.safetensors"  # within the folder: the pipeline as fitted, and the labels remembered
MOST_LINES = 40


def update(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A translated folder, one that update wrote, or a fitted pipeline.")
    ],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="New rows with their labels: csv or parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the model of now is written.")],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="The column of labels or numbers.")],
    most_rows: Annotated[int, typer.Option(min=50, help="Labels that are remembered.")] = 20_000,
    half_life: Annotated[float, typer.Option(help="Updates after which a label has half of its weight.")] = 12.0,
    method: Annotated[
        str,
        typer.Option(help="closed: boosted trees fitted anew; gradient: all is trained; auto: closed where it can."),
    ] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="By gradients: at most; folds of the labels choose.")] = 6,
    lr: Annotated[float, typer.Option(help="By gradients: learning rate.")] = 3e-4,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of folds and shuffling.")] = 0,
    trust_code: TrustPickles = False,
) -> None:
    """Move thresholds, leaves, scales and encoders of a fitted pipeline by a few hundred new labels.

    The folder holds the model of now, the pipeline as it was fitted and the labels remembered: give it to the next
    update, which may write to the same place. Without a sure gain on labels not learnt from the answers stay the fitted
    pipeline's.

    Example: mlsys windtunnel update churn.skops monday.parquet --target churned -o churn

    Example: mlsys windtunnel update churn tuesday.parquet --target churned -o churn
    """
    from mlsys_windtunnel.cli.data import check_table_path, read_table
    from mlsys_windtunnel.cli.fine_tune import loaded_module, split
    from mlsys_windtunnel.export.artifact import refuse_fallbacks, save
    from mlsys_windtunnel.finetune.update import UpdateOptions
    from mlsys_windtunnel.finetune.update import update as bring

    check_table_path(data)
    if output.exists() and not output.is_dir():
        raise InvalidInputError(f"{output} is a file; -o names a folder")
    options = UpdateOptions(
        most_rows=most_rows,
        half_life=half_life,
        method=method,  # type: ignore[arg-type]  # the options check it
        epochs=epochs,
        lr=lr,
        random_state=seed,
        device=device,
    )
    is_of_update = (model / MEMORY).is_file()
    start: WindTunnelModule = loaded_module(model / START if is_of_update else model, trust_code=trust_code)
    refuse_fallbacks(start.frontend, "update with update() in Python and pickle its result")
    memory = _read(model / MEMORY) if is_of_update else None
    x, y = split(read_table(data), target, data, start)
    state = bring(start, x, y, memory=memory, options=options)
    save(state.module, output)
    save(start, output / START)
    _write(state.memory, output / MEMORY)
    moved = f"fitted anew on {len(state.memory.x):,} labels" if state.epochs else "kept as fitted"
    typer.echo(
        f"wrote {output}: {moved}; loss on labels not learnt from fell by {state.gain:.5f} (standard error "
        f"{state.gain_se:.5f}), {state.seconds:.1f} s"
    )


def _write(memory: Memory, path: Path) -> None:
    from dataclasses import fields

    from safetensors.torch import save_file

    save_file({each.name: getattr(memory, each.name).contiguous() for each in fields(memory)}, path)


def _read(path: Path) -> Memory:
    from mlsys_windtunnel.finetune.update import Memory
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return Memory(**load_file(path))
    except (SafetensorError, TypeError) as error:
        raise InvalidInputError(f"{path} is damaged, or no memory of an update ({error})") from error


def moved(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that fine-tune or update wrote.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="MODEL", help="The model before; left out: the one in the folder."),
    ] = None,
    trust_code: TrustPickles = False,
) -> None:
    """Print which thresholds, leaves, scales, weights and categories of a model have moved, and how far.

    Example: mlsys windtunnel moved churn

    Example: mlsys windtunnel moved churn-january --from churn.skops
    """
    from mlsys_windtunnel.cli.fine_tune import loaded_module
    from mlsys_windtunnel.finetune.moved import what_moved
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

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
