"""Registers this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """``mlsys batchmaker``."""
    return [
        CommandSpec(
            name="batchmaker",
            help="Batch single cells of recurrent networks instead of whole requests.",
            app="mlsys_batchmaker.cli:app",
        )
    ]
