"""``mlsys plugins``: list installed plugins, explain a broken one, and write a new one."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

import mlsys_core
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import PluginRow, installed_plugins
from mlsys_core.plugins.specs import noun

app = typer.Typer(no_args_is_help=True)


@app.callback()
def plugins() -> None:
    """List installed plugins, explain one, or write a new one."""


def _adds(row: PluginRow) -> str:
    """Return a plugin's registrations, counted by kind."""
    counts = Counter(type(spec) for spec in row.specs)
    return ", ".join(f"{count} {noun(kind, count)}" for kind, count in counts.items())


@app.command("list")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every plugin found, its state, and for a broken one the reason and the next step.

    Example: MLSYS_PLUGINS=orca,nimble mlsys plugins list
    """
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = installed_plugins().rows
    if as_json:
        fields = ("name", "distribution", "version", "status", "error", "hint", "load_time_s")
        typer.echo(json.dumps([{field: getattr(row, field) for field in fields} for row in rows], indent=1))
        return
    colour = {"loaded": "green", "broken": "red", "blocked": "yellow", "filtered": "dim"}
    table = Table("plugin", "distribution", "version", "state", "adds", "remarks")
    for row in rows:
        state = f"[{colour[row.status]}]{row.status}[/]"
        remarks = "\n".join(escape(text) for text in (row.error, row.hint) if text)
        table.add_row(row.name, row.distribution, row.version, state, _adds(row), remarks)
    Console().print(table)


@app.command()
def info(name: Annotated[str, typer.Argument(help="A name from 'mlsys plugins list'.")]) -> None:
    """Show what one plugin registers; for a broken one, its whole cause (exit code 1).

    Example: mlsys plugins info orca
    """
    rows = {row.name: row for row in reversed(installed_plugins().rows)}
    row = rows.get(name)
    if row is None:
        raise InvalidInputError(f"no plugin is called {name!r} (installed: {', '.join(sorted(rows))})")
    typer.echo(f"{row.name}: {row.status}, from {row.distribution} {row.version}, loaded in {row.load_time_s:.3f} s")
    for spec in row.specs:
        typer.echo(f"  {noun(type(spec)):13} {spec.name:16} {spec.help}")
    if row.hint:
        typer.echo(f"Hint: {row.hint}")
    if row.status == "broken":
        if row.cause is not None:
            typer.echo("".join(traceback.format_exception(row.cause)).rstrip(), err=True)
        raise typer.Exit(1)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The plugin's name: lower case, words joined by '-'.")],
    directory: Annotated[Path | None, typer.Option(help="Where to write it; ./NAME by default.")] = None,
) -> None:
    """Write a working plugin package whose own tests pass.

    Example: mlsys plugins new demo && pip install -e ./demo && mlsys demo-command
    """
    from mlsys_core.cli.plugins import write_plugin

    target = directory or Path(name)
    for path in write_plugin(name, target):
        typer.echo(f"wrote {path}")
    typer.echo(f"Next: pip install -e {target} && mlsys {name}-command && pytest {target}")


def write_plugin(name: str, target: Path) -> list[Path]:
    """Write a plugin package called ``name`` into the new folder ``target``; return the files written.

    Raises:
        InvalidInputError: the name is not usable, or ``target`` exists and is not empty; nothing is written then.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InvalidInputError(
            f"{name!r} is not a plugin name: use lower-case letters and digits, words joined by '-', e.g. my-plugin"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInputError(f"{target} exists and is not empty: choose another folder with --directory")
    major, minor = mlsys_core.__version__.split(".")[:2]
    values = {
        "@NAME@": name,
        "@MODULE@": f"mlsys_{name.replace('-', '_')}",
        "@CORE@": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }
    written = []
    root = importlib.resources.files("mlsys_core") / "plugins" / "template"
    for template, destination in _FILES.items():
        text = (root / template).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(key, value)
            destination = destination.replace(key, value)
        path = target / destination
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


_FILES = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "init.py.tmpl": "src/@MODULE@/__init__.py",
    "plugin.py.tmpl": "src/@MODULE@/_plugin.py",
    "cli.py.tmpl": "src/@MODULE@/cli.py",
    "py.typed.tmpl": "src/@MODULE@/py.typed",
    "test_plugin.py.tmpl": "tests/test_plugin.py",
}
