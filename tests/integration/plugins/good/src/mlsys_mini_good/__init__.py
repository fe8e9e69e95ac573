"""A plugin as it should be: light to import, typed specs, lazy strings."""

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, CompilerSpec, DemoStepSpec


@hookimpl
def mlsys_register_commands():
    return [CommandSpec(name="mini-good", help="Greet.", app="mlsys_mini_good.cli:app")]


@hookimpl
def mlsys_register_compilers():
    return [
        CompilerSpec(name="mini-identity", help="Return the module as it is.", factory="mlsys_mini_good.cli:identity")
    ]


@hookimpl
def mlsys_register_demo_steps():
    return [DemoStepSpec(name="mini-good", help="A mini step", run="mlsys_mini_good.cli:demo_step", order=1)]
