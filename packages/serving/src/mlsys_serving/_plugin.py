"""Register the servers' command with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys serve``."""
    return [CommandSpec(name="serve", help="Serve models with a registered engine.", app="mlsys_serving.cli.serve:app")]
