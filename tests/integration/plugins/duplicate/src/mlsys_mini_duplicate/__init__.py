"""A plugin whose command is already taken by core."""

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec


@hookimpl
def mlsys_register_commands():
    return [
        CommandSpec(name="mini-unique", help="Fine by itself.", app="mlsys_mini_duplicate:nothing"),
        CommandSpec(name="doctor", help="Taken.", app="mlsys_mini_duplicate:nothing"),
    ]
