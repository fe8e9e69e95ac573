"""Every command that computes takes ``--device``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from mlsys_core.cli.lazy_group import LazyGroup, load_command
from mlsys_core.cli.main import build_app, run
from mlsys_core.plugins import installed_plugins

# Commands without --device, and why they need none.
WITHOUT = {
    "build": "compiles; kernels are a CPU's",
    "cache clear": "files",
    "cache list": "files",
    "doctor": "looks at every device",
    "models fetch": "files",
    "models list": "files",
    "models path": "files",
    "plugins info": "what is registered",
    "plugins list": "what is registered",
    "plugins new": "files",
    "trace export": "recordings",
    "trace open": "recordings",
    "trace summary": "recordings",
    "workload generate": "arrivals",
    "workload run": "requests to a server",
    "workload plot": "arrivals",
    "workload show": "arrivals",
    "dvabatch baselines": "simulates stages whose times are given",
    "batchmaker chaos": "kills forked workers, which only a CPU's can be",
    "batchmaker explain": "plans; runs nothing",
    "batchmaker save": "weights in host memory, to files",
    "dvabatch chaos": "kills forked workers, which only a CPU's can be",
    "nimble nets": "a list",
    "nimble run": "a file that was prepared for the CPU",
    "nimble save": "files hold what is prepared for the CPU",
    "nimble streams": "plans; runs nothing",
    "orca quantize": "weights in host memory, to files",
    "orca chaos": "troubles forked workers, which only a CPU's can be",
    "windtunnel inspect": "what a file holds",
    "windtunnel moved": "compares what two files hold",
    "windtunnel translate": "parameters in host memory, to files; predict and fine-tune have it",
    "serve windtunnel": "as windtunnel serve",
    "windtunnel serve": "no torch where it can; exported programs are a CPU's",
}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command that runs something, by its words; a group too that runs without a command."""
    if isinstance(command, LazyGroup):
        for spec in command.registry.all(command.kind):
            if " " not in spec.name:
                yield from commands(load_command(spec, command.registry), (*path, spec.name))
    elif hasattr(command, "commands"):
        if command.invoke_without_command:
            yield " ".join(path), command
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(build_app(installed_plugins()))))


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_that_computes_takes_a_device(name: str) -> None:
    assert ("--device" in options_of(COMMANDS[name])) != (name in WITHOUT)


def test_every_subsystem_has_been_walked_and_no_exception_is_left_over() -> None:
    assert {name.split()[0] for name in COMMANDS} > {"batchmaker", "dvabatch", "nimble", "orca", "windtunnel", "serve"}
    assert WITHOUT.keys() < COMMANDS.keys()


EXPLAINING = {"batchmaker explain", "dvabatch profile", "nimble explain", "nimble streams", "windtunnel inspect"}


def test_commands_that_explain_a_graph_write_it():
    assert {name for name, command in COMMANDS.items() if "--graph" in options_of(command)} == EXPLAINING


@pytest.mark.parametrize("name", sorted(EXPLAINING))
@pytest.mark.parametrize(("file", "says"), [("graph.gif", "end the name in .graphml"), ("none/graph.dot", "no folder")])
def test_a_file_that_cannot_be_written_is_refused_first(
    name: str, file: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run([*name.split(), "there-is-no-such-thing", "--graph", str(tmp_path / file)]) == 2
    assert says in capsys.readouterr().err
