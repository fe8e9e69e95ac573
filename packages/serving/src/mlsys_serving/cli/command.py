"""Turn the fields of option groups into a command's own options."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_core.exits import end_at_once
from mlsys_core.plugins import installed_plugins
from typer.models import OptionInfo

from mlsys_serving.cli.settings_file import SECRET, file_reader, resolved
from mlsys_serving.extensions import Extensions, option_groups

SHARED_PREFIX = "MLSYS_SERVE"  # MLSYS_SERVE_PORT holds for every serve command, MLSYS_ORCA_PORT for one


def serve_command(subsystem: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for the function of a ``serve`` command.

    Each dataclass parameter is replaced by options for its fields; its ``panel`` names their panel in the help.
    ``--config FILE`` is added. An option is looked for on the command line, in ``MLSYS_<SUBSYSTEM>_<NAME>``, in
    ``MLSYS_SERVE_<NAME>`` if it belongs to a group whose ``is_shared`` is not False, and in the file. Values that
    differ from the default are printed, except keys. A parameter of class
    :class:`~mlsys_serving.extensions.Extensions` is given those of the subsystem, and their options are among the
    command's.

    Args:
        subsystem: in the names of variables.
    """
    prefix = f"MLSYS_{subsystem.upper()}"

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(function, include_extras=True)
        own = inspect.signature(function).parameters.values()
        groups = {parameter.name: hints[parameter.name] for parameter in own if is_dataclass(hints[parameter.name])}
        extended = [parameter.name for parameter in own if hints[parameter.name] is Extensions]
        registry = installed_plugins().registry
        added = option_groups(subsystem, registry) if extended else {}
        parameters = [_parameter("context", typer.Context, inspect.Parameter.empty)]
        parameters += [
            _parameter(each.name, _from_environment(hints[each.name], (f"{prefix}_{each.name.upper()}",)), each.default)
            for each in own
            if each.name not in groups and each.name not in extended
        ]
        panel = "Server"
        for group in (*groups.values(), *added.values()):
            panel = getattr(group, "panel", None) or panel
            parameters += _options_of(group, prefix)
        config_option = typer.Option(
            is_eager=True,
            callback=file_reader({each.name: each.annotation for each in parameters[1:]}),
            rich_help_panel=panel,
            help="A TOML file with any of these options, as port = 9000.",
        )
        parameters.append(_parameter("config", Annotated[Path | None, config_option], None))

        def run(context: typer.Context, config: Path | None = None, **given: Any) -> None:  # noqa: ARG001
            with _ended_by_sigterm():
                _refuse_empty_secrets(prefix)
                typer.echo(_settings_line(context), err=True)
                made = {
                    name: group(**{field.name: given.pop(field.name) for field in fields(group) if field.init})
                    for name, group in (*groups.items(), *added.items())
                }
                given |= {name: made[name] for name in groups}
                for name in extended:
                    given[name] = Extensions.of(subsystem, registry, **{each: made[each] for each in added})
                function(**given)

        run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _options_of(group: Any, prefix: str) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    made = []
    for field in (field for field in fields(group) if field.init):
        prefixes = (prefix, SHARED_PREFIX) if getattr(group, "is_shared", True) else (prefix,)
        annotation = _from_environment(hints[field.name], tuple(f"{each}_{field.name.upper()}" for each in prefixes))
        made.append(_parameter(field.name, _in_panel(annotation, group.panel), field.default))
    return made


def _from_environment(annotation: Any, variables: tuple[str, ...]) -> Any:
    return _with_info(annotation, {"envvar": list(variables), "show_envvar": False})


def _in_panel(annotation: Any, panel: str) -> Any:
    return _with_info(annotation, {"rich_help_panel": panel})


def _with_info(annotation: Any, attributes: Mapping[str, Any]) -> Any:
    """Return the annotation with a copy of its option, changed; other commands share the original."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation
    kind, info = typing.get_args(annotation)
    if not isinstance(info, OptionInfo):
        return annotation
    info = copy(info)
    for name, value in attributes.items():
        setattr(info, name, value)
    return Annotated[kind, info]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with one line while a model loads; a running server has its own handler."""

    def leave(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # not by sys.stderr, which may be in the middle of a line and takes no second call
            os.write(2, b"mlsys: stopped by SIGTERM before it was ready\n")
        if _is_import(frame):
            end_at_once(128 + number)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_import(frame: FrameType | None) -> bool:
    """Return True within an import: modules may keep an exception, or fail by it in a way of their own."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _refuse_empty_secrets(prefix: str) -> None:
    """Refuse an empty key: taken as no key, it would leave the server open."""
    for name in sorted(SECRET):
        for variable in (f"{prefix}_{name.upper()}", f"{SHARED_PREFIX}_{name.upper()}"):
            if variable in os.environ and not os.environ[variable].strip():
                raise InvalidInputError(f"{variable} is set, but empty; set it to a key, or unset it")


def _settings_line(context: typer.Context) -> str:
    given = [f"{name} = {_shown(value)} ({where})" for name, (value, where) in resolved(context).items()]
    return f"  settings: {', '.join(given) or 'all by default'}"


def _shown(value: object) -> str:
    """Return a setting as it is written on the command line; several values with spaces between."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
