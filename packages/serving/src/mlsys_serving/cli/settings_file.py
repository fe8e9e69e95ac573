"""Settings of a ``serve`` command, by precedence: flags, then the environment, then one TOML file."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from mlsys_core.errors import InvalidInputError

from mlsys_serving.cli.options import warn

SECRET = frozenset({"api_key"})
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
_MAX_FILE_NBYTES = 2**20
# TOML's types by the option's; whatever is not named is written as a string. True is no number here.
_ALLOWED: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}


def file_reader(annotations: Mapping[str, Any]) -> Callable[[typer.Context, Path | None], Path | None]:
    """Return the callback of ``--config``: it takes the file's values as defaults of the command's options.

    Args:
        annotations: of the options that a file may set, by name: ``int``, ``str | None``, ``list[Path]``.

    Raises:
        InvalidInputError: raised by the callback; the file cannot be read, names an unknown option, or has a
            value of another type.
    """

    def read_file(context: typer.Context, path: Path | None) -> Path | None:
        if path is None:
            return None
        values, mode = _load(path)
        named: dict[str, Any] = {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name not in annotations:
                known = ", ".join(sorted(annotations))
                raise InvalidInputError(f"{path}: there is no setting {key[:80]!r} (there are: {known})")
            if name in named:
                raise InvalidInputError(f"{path}: {name!r} comes twice, with - and with _")
            named[name] = _checked(path, name, value, annotations[name])
        if SECRET & set(named) and stat.S_ISREG(mode) and mode & 0o077:
            warn(f"others may read the keys in {path}; chmod 600 {path}")
        context.default_map = {**(context.default_map or {}), **named}
        return path

    return read_file


def _load(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's values and its mode."""
    try:
        status = path.stat()
        if status.st_size > _MAX_FILE_NBYTES:
            raise InvalidInputError(f"the settings in {path} cannot be read: a file has at most 1 MiB")
        return tomllib.loads(path.read_text(encoding="utf-8")), status.st_mode
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInputError(f"the settings in {path} cannot be read: {error}") from error


def _checked(path: Path, name: str, value: Any, annotation: Any) -> Any:
    """Return ``value`` in the form that the command line's own conversion accepts.

    Used alone, that conversion would read a string as a list of letters, and true and 1.5 as 1.
    """
    kind, is_list = _kind_of(annotation)
    allowed, wanted = _ALLOWED.get(kind, ((str,), "a string"))
    elements = value if is_list and isinstance(value, list) else [value]
    for element in elements:
        if not isinstance(element, allowed) or (isinstance(element, bool) and kind is not bool):
            more = " or a list of such" if is_list else ""
            raise InvalidInputError(f"{path}: {name!r} is {wanted}{more}, got {str(value)[:80]}")
    return elements if is_list else value


def _kind_of(annotation: Any) -> tuple[Any, bool]:
    """Return the type of an option's value, and whether it is a list: ``list[int] | None`` gives (int, True)."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if NoneType in get_args(annotation):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def resolved(context: typer.Context) -> Mapping[str, tuple[Any, str]]:
    """Return the settings that are not the defaults: name -> (value, source). Secrets are not shown."""
    found = {}
    for name, value in sorted(context.params.items()):
        source = context.get_parameter_source(name)
        where = None if source is None else _SOURCES.get(source.name)
        if where is not None and name != "config":
            found[name] = ("***" if name in SECRET else value), where
    return found
