"""The root command: light, lazy, one line per error, right exit codes, completion."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.cli import main as cli
from mlsys_core.cli.lazy_group import load_command, name_of, unwrapped
from mlsys_core.cli.main import run
from mlsys_core.config import read_settings
from mlsys_core.demo import DemoContext
from mlsys_core.errors import InvalidInputError, MlsysError, PluginError
from mlsys_core.plugins import LoadedPlugins, Registry, installed_plugins
from mlsys_core.plugins.specs import CommandSpec
from mlsys_core.report import Section

HEAVY = {
    "torch",
    "fastapi",
    "sklearn",
    "lightgbm",
    "matplotlib",
    "transformers",
    "pandas",
    "ray",
    "uvicorn",
    "grpc",
    "httpx",
    "networkx",
    "numpy",
}


@pytest.mark.parametrize(
    "code",
    [
        "import mlsys_core",
        "import mlsys_core.plugins, mlsys_core.models, mlsys_core.report, mlsys_core.demo, mlsys_core.bench",
        "import mlsys_core.device, mlsys_core.profiling, mlsys_core.loop",
        "import mlsys_core.memory, mlsys_core.workload  # numpy",
        "from mlsys_core.cli.main import run; run(['--help'])",
        "from mlsys_core.cli.main import run; run(['plugins', 'list'])",
        "from mlsys_core.cli.main import run; run(['models', 'list'])",
        "import mlsys_nimble, mlsys_orca, mlsys_windtunnel, mlsys_batchmaker, mlsys_dvabatch",
    ],
)
def test_light_things_import_nothing_heavy(code: str):
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert HEAVY & set(json.loads(result.stdout.splitlines()[-1])) == ({"numpy"} if code.endswith("# numpy") else set())


def test_the_list_of_commands_needs_no_rich():
    script = "from mlsys_core.cli.main import run; run([]); import sys; print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
    said = " ".join(result.stdout.split())
    assert "..." not in said.partition("Commands:")[2]  # no help is cut
    assert "doctor Show what this machine and installation can do, and what is missing." in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["doctr"], "Did you mean 'doctor'?"),
        (["--nope"], "No such option: --nope"),
        (["models", "path"], "Missing argument 'name'"),
        (["models", "path", "nothing-like-it"], "is neither a known model"),
        (["plugins", "info", "nope"], "no plugin is called 'nope'"),
        (["demo", "--only", "nope"], "no demo step is called 'nope'"),
        (["demo", "--threads", "-1"], "Invalid value for '--threads'"),
        (["bench", "x", "--threads", "none"], "Invalid value for '--threads'"),
    ],
)
def test_wrong_arguments_are_one_clear_line_and_exit_code_2(arguments, says, capsys):
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert error.startswith("mlsys: error: ")


def test_no_arguments_show_help(capsys):
    assert cli.run([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mlsys 0.")


def test_every_command_explains_itself(capsys):
    from mlsys_core.plugins import installed_plugins

    names = [spec.name for spec in installed_plugins().registry.all(CommandSpec)]
    assert {"bench", "demo", "doctor", "models", "orca", "plugins", "trace", "workload"} <= set(names)
    for name in names:
        assert cli.run([*name.split(), "--help"]) == 0, name
        assert f"mlsys {name}" in capsys.readouterr().out


def raising(error: BaseException):
    """A plugin set whose one command raises ``error``."""
    import types

    import typer

    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    module = types.ModuleType("raising_command")
    module.app = app  # type: ignore[attr-defined]
    sys.modules["raising_command"] = module
    registry = Registry()
    registry.add(CommandSpec(name="fail", help="x", app="raising_command:app"), "test")
    return LoadedPlugins([], registry)


def test_a_plugin_adds_a_command_below_anothers(capsys, monkeypatch):
    import types

    import typer

    group, leaf = typer.Typer(), typer.Typer()

    @group.callback()
    def parent() -> None:
        """Hold commands."""

    @leaf.command()
    def say(word: str) -> None:
        """Say it."""
        typer.echo(word)

    monkeypatch.setitem(sys.modules, "nested_command", types.SimpleNamespace(group=group, leaf=leaf))
    registry = Registry()
    registry.add(CommandSpec(name="parent", help="x", app="nested_command:group"), "one")
    registry.add(CommandSpec(name="parent say", help="x", app="nested_command:leaf"), "other")
    monkeypatch.setattr(cli, "installed_plugins", lambda: LoadedPlugins([], registry))
    assert cli.run(["parent", "say", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert cli.run(["parent", "--help"]) == 0
    assert "Say it." in capsys.readouterr().out
    assert cli.run([]) == 0
    assert "parent say" not in capsys.readouterr().out
    registry.add(CommandSpec(name="parent say more", help="x", app="nested_command:leaf"), "third")
    assert cli.run(["parent", "say", "hello"]) == 1
    assert "'parent say' has no commands below it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MlsysError("it went\nwrong"), 1, "mlsys: error: it went wrong\n"),
        (InvalidInputError("bad value"), 2, "mlsys: error: bad value\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line(error, code, says, monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed_plugins", lambda: raising(error))
    assert cli.run(["fail"]) == code
    assert capsys.readouterr().err.startswith(says)


def test_a_defect_names_its_command_and_debug_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed_plugins", lambda: raising(ZeroDivisionError("defect")))
    assert cli.run(["fail"]) == 1
    said = "mlsys: error: command 'fail' of test failed (ZeroDivisionError: defect); MLSYS_DEBUG=1 shows where\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(cli, "settings", lambda: read_settings({"MLSYS_DEBUG": "1"}))
    with pytest.raises(PluginError) as error:
        cli.run(["fail"])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_shell_completion_offers_commands_and_subcommands():
    def complete(words: str, index: int) -> str:
        env = {
            "_MLSYS_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(index),
            "PATH": "/usr/bin:/bin",
        }
        command = [sys.executable, "-c", "from mlsys_core.cli.main import main; main()"]
        return subprocess.run(command, capture_output=True, text=True, env=env).stdout

    assert complete("mlsys pl", 1).split() == ["plugins"]
    assert set(complete("mlsys plugins ", 2).split()) == {"list", "info", "new"}


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


def test_steps_may_write_beside_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_steps(_: object, context: DemoContext) -> list[Section]:
        (context.output_dir / "picture.png").write_bytes(b"")
        return []

    monkeypatch.setattr("mlsys_core.demo.run_steps", run_steps)
    assert run(["demo", "--report", str(tmp_path / "new" / "demo.html")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"demo.html", "picture.png"}
