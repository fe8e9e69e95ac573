"""Options that several commands below ``mlsys orca`` have: one name, one help."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from mlsys_orca.cli.main import app
from typer.main import get_command

# Options whose meaning is the command's own, by name.
OWN = {
    "model",
    "name",
    "output",
    "max_tokens",
    "temperature",
    "seed",
    "source",
    "threads",
    "dtype",
    "kv_tokens",
    "device",
}


@pytest.mark.parametrize("pair", [("serve", "generate")])
def test_an_option_of_two_commands_has_one_help(pair: tuple[str, str]) -> None:
    commands: Any = vars(get_command(app))["commands"]
    helps: dict[str, set[str | None]] = defaultdict(set)
    for name in pair:
        for parameter in commands[name].params:
            if parameter.name not in OWN or {parameter.name, *pair} == {"model", "serve", "generate"}:
                helps[parameter.name].add(getattr(parameter, "help", None))
    assert helps
    assert {name: texts for name, texts in helps.items() if len(texts) > 1} == {}
