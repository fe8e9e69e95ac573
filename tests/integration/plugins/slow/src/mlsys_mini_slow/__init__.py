"""A plugin that is slow to import, as one that imports a heavy library at the top."""

import time

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec

time.sleep(0.4)


@hookimpl
def mlsys_register_commands():
    return [CommandSpec(name="mini-slow", help="Exist.", app="mlsys_mini_slow:nothing")]
