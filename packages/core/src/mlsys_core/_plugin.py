"""What the core itself registers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """The commands that belong to no subsystem."""
    commands = {
        "demo": "Run each subsystem on real input and write one HTML report.",
        "doctor": "Show what this machine and installation can do, and what is missing.",
        "models": "List, fetch and locate models and data that need no hub.",
        "plugins": "List installed plugins, explain one, or write a new one.",
        "bench": "Run a benchmark suite against its peers.",
        "trace": "Summarise or view a recorded timeline.",
        "workload": "Make request traces and drive a server with them.",
    }
    return [CommandSpec(name=name, help=help_, app=f"mlsys_core.cli.{name}:app") for name, help_ in commands.items()]
