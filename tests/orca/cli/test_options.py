"""Options that several commands below ``mlsys orca`` have: one name, one help."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from mlsys_core.cli.lazy_group import load_command
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import CommandSpec

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


def commands_of_orca() -> Any:
    registry = installed_plugins().registry
    return load_command(registry.get(CommandSpec, "orca"), registry).commands


@pytest.mark.parametrize("pair", [("serve", "generate")])
def test_an_option_of_two_commands_has_one_help(pair: tuple[str, str]) -> None:
    commands = commands_of_orca()
    helps: dict[str, set[str | None]] = defaultdict(set)
    for name in pair:
        for parameter in commands[name].params:
            if parameter.name not in OWN or {parameter.name, *pair} == {"model", "serve", "generate"}:
                helps[parameter.name].add(getattr(parameter, "help", None))
    assert helps
    assert {name: texts for name, texts in helps.items() if len(texts) > 1} == {}


# Options of ``mlsys orca serve`` beside those of every server and of extensions.
OF_SERVE = """
activations adapter batch_invariant chat_template compiler device dtype executor
heartbeat_timeout join_timeout kv_dtype kv_tokens max_batch_size max_batch_tokens max_chunk_tokens max_model_len
max_waiting memory_pool name pipeline_parallel policy ray_address replicas
single_process speculate tensor_parallel threads weights
"""


def test_serve_has_its_options_each_with_one_variable_of_its_own() -> None:
    commands = commands_of_orca()
    options = [each for each in commands["serve"].params if each.param_type_name == "option"]
    own = {each.name: each.envvar for each in options if each.rich_help_panel is None}
    assert own == {name: [f"MLSYS_ORCA_{name.upper()}"] for name in OF_SERVE.split()}
