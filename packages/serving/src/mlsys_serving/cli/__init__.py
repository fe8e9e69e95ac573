"""Options that every ``serve`` command has, defined once: listening, access and limits.

A command names the groups that it takes as parameters, and :func:`serve_command` turns their fields into its options.
Each option may also come from the environment and from the TOML file of ``--config``. Imports no web framework.
"""

from mlsys_serving.cli.command import serve_command
from mlsys_serving.cli.options import Instances, ServerOptions, announce
from mlsys_serving.extensions import Extensions

__all__ = ["Extensions", "Instances", "ServerOptions", "announce", "serve_command"]
