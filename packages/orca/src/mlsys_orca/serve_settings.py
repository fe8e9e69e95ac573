"""Where the settings of ``mlsys orca serve`` come from: flags, then the environment, then one TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from mlsys_core.errors import InvalidInputError

ENVIRONMENT_PREFIX = "MLSYS_ORCA"  # --max-batch-size is MLSYS_ORCA_MAX_BATCH_SIZE
SECRET = frozenset({"api_key"})
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values as defaults of the command's options; a callback of an eager option.

    Raises:
        InvalidInputError: it cannot be read, or names an option that there is not.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(f"the settings in {path} cannot be read: {error}") from error
    known = {str(parameter.name) for parameter in context.command.params} - {"config", "help"}
    named = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := sorted(set(named) - known):
        raise InvalidInputError(f"{path}: there is no setting {unknown[0]!r} (there are: {', '.join(sorted(known))})")
    context.default_map = {**(context.default_map or {}), **named}
    return path


def resolved(context: typer.Context) -> Mapping[str, tuple[Any, str]]:
    """The settings that are not the defaults: name -> (value, where it comes from). Secrets are not shown."""
    found = {}
    for name, value in sorted(context.params.items()):
        source = context.get_parameter_source(name)
        where = None if source is None else _SOURCES.get(source.name)
        if where is not None and name != "config":
            found[name] = ("***" if name in SECRET else value), where
    return found
