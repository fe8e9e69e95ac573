"""Register the score with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, ServerExtensionSpec


@hookimpl
def mlsys_register_server_extensions() -> Iterable[ServerExtensionSpec]:
    """Return the live page."""
    return [
        ServerExtensionSpec(
            name="score",
            help="The live page at /: requests as rows, batches as columns.",
            factory="mlsys_score.extension:extend",
            options="mlsys_score.extension:ScoreOptions",
        )
    ]


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys trace open``."""
    return [CommandSpec(name="trace open", help="Open a recording of the score, offline.", app="mlsys_score.cli:app")]
