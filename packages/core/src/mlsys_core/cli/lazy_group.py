"""A Typer group whose commands are imported only when one is run; ``--help`` and completion of names need none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperGroup

from mlsys_core.errors import PluginError
from mlsys_core.plugins.registry import Registry, failing_as
from mlsys_core.plugins.specs import CommandSpec, EngineSpec, noun

AppSpec: TypeAlias = CommandSpec | EngineSpec  # specs with a Typer app


def _stub(spec: AppSpec) -> Any:
    """Return a placeholder command that carries only the name and help of ``spec``, for listings."""
    app = typer.Typer(add_completion=False)

    is_hidden = isinstance(spec, CommandSpec) and spec.hidden

    @app.command(name=spec.name, help=spec.help, short_help=spec.help, hidden=is_hidden)  # a short help is not cut
    def placeholder() -> None:
        raise AssertionError("a listing's placeholder is never run")

    return typer.main.get_command(app)


def load_command(spec: AppSpec, registry: Registry | None = None) -> Any:
    """Import the Typer app of ``spec`` and turn it into a runnable command.

    Args:
        spec: The command; "orca quantize" is the command ``quantize`` below that of the name "orca".
        registry: Where commands below this one are looked for; None: it has its own alone.

    Raises:
        PluginError: the app is no Typer app, or commands are registered below one that is no group.
    """
    found = registry or Registry()
    app = found.part(spec)
    if not isinstance(app, typer.Typer):
        raise PluginError(f"{noun(type(spec))} {spec.name!r}: {spec.app} is a {type(app).__name__}, not a typer.Typer")
    app._add_completion = False  # the root offers completion for all
    with failing_as(spec, found):
        command: Any = typer.main.get_command(app)
    _name_failures(command, spec, found)
    command.name = spec.name.rpartition(" ")[2]
    show_help_alike(command)
    known = registry.all(CommandSpec) if registry is not None and isinstance(spec, CommandSpec) else []
    if registry is not None and (nested := [each for each in known if each.name.rpartition(" ")[0] == spec.name]):
        if not isinstance(command, TyperGroup):
            raise PluginError(f"command {nested[0].name!r}: {spec.name!r} has no commands below it")
        command.commands = _Nested(command.commands, nested, registry)
    return command


class _Nested(dict[str, Any]):
    """Commands of a group by name, its own and registered ones; these are imported when they are asked for."""

    def __init__(self, own: Mapping[str, Any], specs: Sequence[CommandSpec], registry: Registry) -> None:
        super().__init__({**own} | {spec.name.rpartition(" ")[2]: spec for spec in specs})
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, CommandSpec):
            found = self[name] = load_command(found, self._registry)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


def _name_failures(command: Any, spec: AppSpec, registry: Registry) -> None:
    """Have exceptions of a command's code, while it reads its arguments and while it runs, name its plugin."""
    passing = (typer.TyperException, typer.Exit, typer.Abort, BrokenPipeError, SystemExit)

    def naming(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with failing_as(spec, registry, passing=passing):
                return function(*args, **keywords)

        return call

    command.make_context, command.invoke = naming(command.make_context), naming(command.invoke)


class LazyGroup(TyperGroup):
    """A group of registered apps; :func:`lazy_group` makes the subclass that knows the registry and the kind."""

    registry: ClassVar[Registry]
    kind: ClassVar[type[AppSpec]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for spec in sorted(self.registry.all(self.kind), key=lambda spec: spec.name):
            if " " not in spec.name:  # others are below the command of their first word
                self.commands[spec.name] = _stub(spec)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Swap the placeholder for the real command, now that it is needed."""
        name = args[0]
        if name in self.commands:
            self.commands[name] = load_command(self.registry.get(self.kind, name), self.registry)
        elif self.kind is not CommandSpec:
            self.registry.chosen(self.kind, name)  # raises, and lists what there is
        elif name in self.registry.unavailable:
            raise PluginError(f"plugin {name!r} is installed but not loaded: {self.registry.unavailable[name]}")
        return super().resolve_command(ctx, args)


def lazy_group(registry: Registry, kind: type[AppSpec] = CommandSpec) -> type[LazyGroup]:
    """Return a group's class over the specs of ``kind`` in ``registry`` (Typer takes a class, not an instance)."""
    return type("MlsysGroup", (LazyGroup,), {"registry": registry, "kind": kind})


__all__: Sequence[str] = ["LazyGroup", "lazy_group", "load_command"]


_UNKNOWN = SimpleNamespace(is_choice=True)  # Typer before 0.29 has labels of its own
_NAMES = {"str": "TEXT", "datetime": "TIME", "file": "PATH", "directory": "PATH"}


def show_help_alike(command: Any) -> None:
    """Have a command, and all below it, show their help in one style.

    Args:
        command: A Typer command or group (Typer's classes are its own, so it has no type here).
    """
    command.help = None if command.help is None else unwrapped(command.help)
    for parameter in command.params:
        _show(parameter)
    own = command.get_help_option

    def get_help_option(context: Any) -> Any:
        option = own(context)
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = get_help_option
    for below in getattr(command, "commands", {}).values():
        show_help_alike(below)


def _show(parameter: Any) -> None:
    if parameter.metavar is not None and parameter.param_type_name == "option":
        return
    if getattr(parameter, "is_bool_flag", False):
        parameter.metavar = ""
    elif not getattr(parameter, "type_descriptor", _UNKNOWN).is_choice:
        label = name_of(parameter.display_type(None))
        parameter.display_type = lambda _: label


def name_of(label: str) -> str:
    """Return the name of a type for readers, from Typer's label for it.

    Example:
        >>> name_of("<list[int range]>")
        'INT'
    """
    word = label.strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range")
    return _NAMES.get(word, word.upper())


def unwrapped(text: str) -> str:
    r"""Return ``text`` with each paragraph on one line; lines that begin with a space or a hyphen stay.

    Example:
        >>> unwrapped("One,\ntwo.\n\nThree:\n- four")
        'One, two.\n\nThree:\n- four'
    """
    return re.sub(r"(?<=[^\n])\n(?=[^\n\s-])", " ", text)
