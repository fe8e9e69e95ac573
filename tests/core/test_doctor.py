"""``mlsys doctor``: rendering, JSON, exit codes, and the command itself on this installation."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlsys_core.cli import doctor
from mlsys_core.device.checks import Check
from mlsys_core.plugins import PluginRow
from rich.console import Console

CHECKS = (
    Check("System", "Python", "3.12 [final]", "ok"),
    Check("Tools", "g++", "not found", "missing", "apt-get install g++"),
    Check("Tools", "npm", "not found", "missing", "apt-get install npm"),
    Check("Packages", "a", "needs x", "broken", "pip install 'x>=1'"),
    Check("Packages", "b", "needs x", "broken", "pip install 'x>=1'"),
)


def rendered(checks: tuple[Check, ...], width: int = 100) -> str:
    stream = io.StringIO()
    doctor.render(checks, Console(file=stream, width=width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def plugin(**fields: object) -> PluginRow:
    values = {"name": "orca", "distribution": "mlsys-orca", "version": "0.1.0", "status": "loaded", **fields}
    return PluginRow(**values)  # type: ignore[arg-type]


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlsys_core", "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)


def test_rows_are_shown_by_section_with_their_status() -> None:
    lines = rendered(CHECKS).splitlines()
    assert lines[:2] == ["System", "  Python  ok       3.12 [final]"]
    assert "  g++     missing  not found" in lines
    assert lines.count("Tools") == 1


def test_remedies_come_once_each_and_whole_however_narrow_the_screen() -> None:
    long = "pip install " + " ".join(f"package-{number}" for number in range(20))
    text = rendered((*CHECKS, Check("Tools", "x", "not found", "missing", long)), width=40)
    assert text.count("  pip install 'x>=1'") == 1
    assert f"  {long}" in text.splitlines()
    assert text.index("Broken, mend with:") < text.index("pip install 'x>=1'") < text.index("Optional, add with:")


def test_the_verdict_counts_what_is_broken() -> None:
    assert rendered(CHECKS).endswith("2 broken: mlsys cannot work like this.")
    assert rendered(CHECKS[:3]).endswith("mlsys can work here.")


def test_a_loaded_plugin_is_ok_and_a_slow_one_says_so() -> None:
    (check,) = doctor.plugin_checks([plugin(load_time_s=0.5, hint="took 0.5 s")])
    assert check == Check("Plugins", "orca", "mlsys-orca 0.1.0, loaded in 500 ms; took 0.5 s", "ok")


@pytest.mark.parametrize(("distribution", "status"), [("mlsys-orca", "broken"), ("someone-else", "missing")])
def test_a_broken_plugin_breaks_the_installation_only_if_built_in(distribution: str, status: str) -> None:
    row = plugin(distribution=distribution, status="broken", error="ImportError: no x", hint="pip install x")
    (check,) = doctor.plugin_checks([row])
    assert (check.status, check.fix) == (status, "pip install x")
    assert check.value == f"{distribution} 0.1.0, not loaded: ImportError: no x"


@pytest.mark.parametrize("status", ["blocked", "filtered"])
def test_a_plugin_left_out_on_purpose_is_information(status: str) -> None:
    (check,) = doctor.plugin_checks([plugin(status=status, hint="MLSYS_PLUGINS_BLOCK names 'orca'")])
    assert check == Check("Plugins", "orca", f"mlsys-orca 0.1.0, {status}: MLSYS_PLUGINS_BLOCK names 'orca'", "info")


def test_plugins_that_cannot_be_listed_are_broken() -> None:
    (check,) = doctor.plugin_checks([], "ImportError: x")
    assert check.status == "broken"
    assert "ImportError: x" in check.value


def test_the_command_shows_this_installation() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("Processor", "multiplies", "mlsys-core", "Plugins", "mlsys can work here."):
        assert expected in done.stdout


def test_the_command_prints_json_alone() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "ok"
    loaded = {entry["distribution"] for entry in data["plugins"] if entry["status"] == "loaded"}
    assert "mlsys-core" in loaded
    assert {check["section"] for check in data["checks"]} >= {"System", "Torch", "GPU", "Tools", "Packages", "Plugins"}


def test_a_broken_torch_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os\nos.abort()\n")
    done = run("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "broken"
    (check,) = [check for check in data["checks"] if check["name"] == "torch"]
    assert check["status"] == "broken"
    assert "SIGABRT" in check["value"]


def test_a_broken_built_in_plugin_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "mlsys_orca").mkdir()
    (tmp_path / "mlsys_orca" / "__init__.py").write_text("raise RuntimeError('out of order')\n")
    (plugin,) = [
        row for row in json.loads(run("--json", PYTHONPATH=str(tmp_path)).stdout)["plugins"] if row["name"] == "orca"
    ]
    assert plugin["error"] == "RuntimeError: out of order"
    done = run(PYTHONPATH=str(tmp_path))
    if "mlsys-orca" not in done.stdout:
        pytest.skip("mlsys-orca is not installed here")
    assert done.returncode == 1, done.stdout
    assert "not loaded: RuntimeError: out of order" in " ".join(done.stdout.split())
    assert "1 broken" in done.stdout
