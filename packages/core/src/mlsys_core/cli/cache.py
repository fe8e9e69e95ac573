"""``mlsys cache``: show and clear the cache folder. All of it is made again when it is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError

app = typer.Typer(no_args_is_help=True)

KINDS = {
    "native": "compiled kernels",
    "nimble": "Nimble's measurements of kernels",
    "packed": "packed copies of models, which later starts map (MLSYS_PACKED_GB bounds them)",
    "dvabatch-profiles": "DVABatch's times of stages",
}


@app.callback()
def cache() -> None:
    """Show or clear the cache folder; MLSYS_CACHE_DIR names it."""


def files_of(kind: Path) -> list[Path]:
    """Return the files below a folder of the cache, links not followed."""
    return [path for path in sorted(kind.rglob("*")) if path.is_file() and not path.is_symlink()]


def kinds_in(folder: Path) -> list[Path]:
    """Return the folders of the cache; none where there is no cache yet."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


@app.command("list")
def list_cache(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List what is cached: kind, number of files, size.

    Example: mlsys cache list
    """
    import json

    folder = settings().cache_dir
    rows: list[dict[str, Any]] = []
    for kind in kinds_in(folder):
        sizes = [path.stat().st_size for path in files_of(kind)]
        rows.append({"kind": kind.name, "help": KINDS.get(kind.name, ""), "files": len(sizes), "nbytes": sum(sizes)})
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "kinds": rows}, indent=1))
        return
    typer.echo(folder)
    for row in rows:
        typer.echo(f"{row['kind']:18} {row['nbytes'] / 1e6:10.1f} MB {row['files']:6} files  {row['help']}")


@app.command()
def clear(
    kinds: Annotated[list[str] | None, typer.Argument(help="Kinds to clear, as 'mlsys cache list' shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Clear all kinds.")] = False,
) -> None:
    """Remove what is cached of some kinds. Processes that run keep what they have mapped.

    Example: mlsys cache clear packed
    """
    import shutil

    there = {path.name: path for path in kinds_in(settings().cache_dir)}
    chosen = list(there) if everything else kinds or []
    unknown = [name for name in chosen if name not in there]
    if unknown or not (kinds or everything):
        wrong = f"{unknown[0]!r} is not cached" if unknown else "nothing was named to clear"
        raise InvalidInputError(f"{wrong}; there are {', '.join(there) or 'none'}, and --all")
    for name in chosen:
        nbytes = sum(path.stat().st_size for path in files_of(there[name]))
        shutil.rmtree(there[name])
        typer.echo(f"{name}: {nbytes / 1e6:.1f} MB removed")
