"""Help of every command in one style: types as TEXT, INT, PATH; nothing beside a flag; paragraphs on one line."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

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
