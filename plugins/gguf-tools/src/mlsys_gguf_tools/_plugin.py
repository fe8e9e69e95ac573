"""Register mlsys-gguf-tools with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the command ``mlsys orca quantize``."""
    about = "Write a model as a GGUF file of fewer bits."
    return [CommandSpec(name="orca quantize", help=about, app="mlsys_gguf_tools.cli:app")]
