"""``mlsys serve``: the engines that plugins registered, each with options of its own."""

from __future__ import annotations

import typer
from mlsys_core.cli.lazy_group import lazy_group
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import EngineSpec

app = typer.Typer(cls=lazy_group(installed_plugins().registry, EngineSpec))


@app.callback(invoke_without_command=True)
def serve(context: typer.Context) -> None:
    """Serve models with one of the registered engines, until Ctrl-C; without one, list them.

    Example: mlsys serve orca smollm2-135m-instruct --port 8000
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
