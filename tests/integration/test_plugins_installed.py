"""The six mini plugins, really installed into an environment of their own, seen through the real ``mlsys`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parent / "plugins"
NAMES = sorted(path.name for path in PLUGINS.iterdir() if path.is_dir())
Mlsys = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def python(install: Callable[..., Path]) -> Path:
    """The interpreter of an environment that sees this one's packages and holds the six plugins; needs no index."""
    return install(*(PLUGINS / name for name in NAMES))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that exists once the plugin for the old core was imported."""
    return tmp_path / "imported"


@pytest.fixture
def mlsys(python: Path, trace: Path, tmp_path: Path) -> Mlsys:
    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MLSYS_")}
        env |= {"MINI_OLD_API_TRACE": str(trace), "COLUMNS": "200", **variables}
        command = [str(python), "-m", "mlsys_core", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)

    return call


def test_there_are_six():
    assert NAMES == ["broken", "duplicate", "good", "old_api", "slow", "typo"]


def test_list_works_and_explains_each(mlsys: Mlsys, trace: Path):
    result = mlsys("plugins", "list", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["mini-good"]["status"] == "loaded"
    assert rows["mini-good"]["hint"] is None
    assert rows["mini-slow"]["status"] == "loaded"
    assert "delays every command" in rows["mini-slow"]["hint"]
    assert "a_module_that_does_not_exist" in rows["mini-broken"]["error"]
    assert "mlsys_register_comands" in rows["mini-typo"]["error"]
    assert rows["mini-typo"]["hint"] == "did you mean mlsys_register_commands?"
    assert "needs mlsys-core<0.0.5" in rows["mini-old_api"]["error"]
    assert rows["mini-old_api"]["hint"] == "pip install --upgrade mlsys-mini-old_api"
    assert "registered by both mlsys-core and mlsys-mini-duplicate" in rows["mini-duplicate"]["error"]
    assert not trace.exists(), "the version check must come before the import"


def test_each_broken_plugin_is_one_warning_line(mlsys: Mlsys):
    warnings = mlsys("models", "list").stderr.splitlines()
    assert len(warnings) == 4
    for name in ("mini-broken", "mini-typo", "mini-old_api", "mini-duplicate"):
        assert sum(f"plugin {name!r}" in line for line in warnings) == 1


def test_a_refused_plugin_leaves_nothing_behind(mlsys: Mlsys):
    result = mlsys("mini-unique")
    assert result.returncode == 2
    assert "No such command 'mini-unique'" in result.stderr


def test_the_table_names_every_plugin(mlsys: Mlsys):
    table = mlsys("plugins", "list").stdout
    for name in NAMES:
        assert f"mini-{name}" in table


def test_a_good_plugin_works_among_the_bad(mlsys: Mlsys):
    result = mlsys("mini-good", "--times", "2")
    assert (result.returncode, result.stdout) == (0, "hello from mini-good\n" * 2)
    assert "mini-good" in mlsys("--help").stdout


def test_asked_for_by_name_a_broken_plugin_fails_hard(mlsys: Mlsys):
    info = mlsys("plugins", "info", "mini-broken")
    assert info.returncode == 1
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in info.stderr
    named = mlsys("plugins", "list", MLSYS_PLUGINS="mini-broken")
    assert named.returncode == 1
    assert "plugin 'mini-broken' (mlsys-mini-broken) is broken" in named.stderr
    command = mlsys("mini-broken")
    assert command.returncode == 1
    assert "installed but not loaded: ModuleNotFoundError" in command.stderr.splitlines()[-1]


def test_filter_block_and_strict(mlsys: Mlsys):
    def status(**variables: str) -> dict[str, str]:
        rows = json.loads(mlsys("plugins", "list", "--json", **variables).stdout)
        return {row["name"]: row["status"] for row in rows}

    filtered = status(MLSYS_PLUGINS="mini-good")
    assert {name for name, state in filtered.items() if state == "loaded"} == {"core", "mini-good"}
    assert filtered["mini-broken"] == "filtered"
    assert status(MLSYS_PLUGINS_BLOCK="mini-good")["mini-good"] == "blocked"
    strict = mlsys("plugins", "list", MLSYS_PLUGINS_STRICT="1")
    assert strict.returncode == 1
    assert "Error" in strict.stderr.splitlines()[-1]


def test_its_demo_step_runs_and_lands_in_the_report(mlsys: Mlsys, tmp_path: Path):
    result = mlsys("demo", "--only", "mini-good", "--report", str(tmp_path / "page.html"))
    assert result.returncode == 0, result.stderr
    assert "mini step at work" in result.stdout
    page = (tmp_path / "page.html").read_text()
    assert "Mini step" in page
    assert "It ran." in page


def test_a_new_plugin_works_and_its_own_tests_pass(mlsys: Mlsys, python: Path, tmp_path: Path):
    assert mlsys("plugins", "new", "fresh-one").returncode == 0
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    package = tmp_path / "fresh-one"
    try:
        subprocess.run([*install, "--no-build-isolation", "-e", str(package)], check=True)
        result = mlsys("fresh-one-command", "--name", "reader")
        assert (result.returncode, result.stdout) == (0, "Hello, reader, from fresh-one.\n")
        tests = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)],
            capture_output=True,
            text=True,
            cwd=package,
            env={**os.environ, "MLSYS_PLUGINS": "fresh-one"},
        )
        assert tests.returncode == 0, tests.stdout + tests.stderr
        assert "5 passed" in tests.stdout
    finally:
        uninstall = [sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "-y", "mlsys-fresh-one"]
        subprocess.run(uninstall, check=True)


@pytest.mark.parametrize("name", ["Bad", "-x", "1x", "a_b", "class", ""])
def test_a_bad_plugin_name_is_refused_and_nothing_written(mlsys: Mlsys, tmp_path: Path, name: str):
    result = mlsys("plugins", "new", "--", name)
    assert result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(mlsys: Mlsys, tmp_path: Path):
    kept = tmp_path / "taken" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    result = mlsys("plugins", "new", "taken")
    assert result.returncode == 2
    assert [path.name for path in kept.parent.iterdir()] == ["mine.txt"]
