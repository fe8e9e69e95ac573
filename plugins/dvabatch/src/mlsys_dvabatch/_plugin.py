"""Registers this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """``mlsys dvabatch``."""
    return [
        CommandSpec(
            name="dvabatch",
            help="Let requests join and leave a batch between the stages of a model.",
            app="mlsys_dvabatch.cli:app",
        )
    ]
