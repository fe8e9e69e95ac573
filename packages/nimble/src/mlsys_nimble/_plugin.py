"""Registration of this package with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, CompilerSpec, DemoStepSpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Register ``mlsys nimble``."""
    return [
        CommandSpec(
            name="nimble",
            help="Schedule a model ahead of time, on as many streams as it has independent operators.",
            app="mlsys_nimble.cli.main:app",
        )
    ]


@hookimpl
def mlsys_register_compilers() -> Iterable[CompilerSpec]:
    """Register Nimble as a compiler of modules."""
    return [
        CompilerSpec(
            name="nimble",
            help="A schedule made ahead of time, replayed natively.",
            factory="mlsys_nimble.module:compile",
        )
    ]


@hookimpl
def mlsys_register_demo_steps() -> Iterable[DemoStepSpec]:
    """Register the demo of two prepared nets."""
    return [
        DemoStepSpec(
            name="nimble",
            help="Nimble: two nets scheduled ahead of time, beside eager PyTorch",
            run="mlsys_nimble.cli.demo:run",
            order=40,
        )
    ]
