"""A plugin that mistyped a hook's name."""

from mlsys_core.plugins.hookspecs import hookimpl


@hookimpl
def mlsys_register_comands():
    return []
