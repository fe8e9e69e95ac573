"""Registers this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """``mlsys nimble``."""
    return [
        CommandSpec(
            name="nimble",
            help="Schedule a model ahead of time, on as many streams as it has independent operators.",
            app="mlsys_nimble.cli:app",
        )
    ]
