"""Every command shows the types of its options in one style."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mlsys_core.cli.lazy_group import load_command, name_of, unwrapped
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import CommandSpec

COMMANDS = sorted(installed_plugins().registry.all(CommandSpec), key=lambda spec: spec.name)


def below(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from below(each)


@pytest.mark.parametrize("spec", COMMANDS, ids=lambda spec: spec.name)
def test_no_command_shows_pythons_names_of_types(spec: CommandSpec) -> None:
    for command in below(load_command(spec)):
        context = command.make_context(command.name, [], resilient_parsing=True)
        for parameter in command.get_params(context):
            shown = parameter.display_type_rich(context)
            if getattr(parameter, "is_bool_flag", False):
                assert shown == "", (command.name, parameter.name)
            elif not parameter.type_descriptor.is_choice:
                assert "<" not in shown, (command.name, parameter.name, shown)


def test_names_of_types() -> None:
    assert [name_of(each) for each in ("<str>", "<path>", "<int range>", "<list[str]>", "<datetime>")] == [
        "TEXT",
        "PATH",
        "INT",
        "TEXT",
        "TIME",
    ]


def test_paragraphs_are_one_line_each() -> None:
    assert unwrapped("One,\ntwo.\n\nThree:\n- four\n- five\n  six") == "One, two.\n\nThree:\n- four\n- five\n  six"
