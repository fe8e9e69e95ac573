"""Other Pythons are found where they answer, and a source that warns fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pythons() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pythons", ROOT / "scripts" / "pythons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pythons"] = module
    spec.loader.exec_module(module)
    return module


def command(path: Path, script: str) -> Path:
    """Write a command for a shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_versions_are_those_that_the_classifiers_name(pythons: ModuleType):
    own = "{}.{}".format(*sys.version_info)
    assert sorted({*pythons.versions(), own}) == ["3.11", "3.12", "3.13", "3.14"]
    assert own not in pythons.versions()


def test_an_interpreter_is_taken_where_it_answers(pythons: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    assert pythons.find("3.12") is None
    command(tmp_path / "bin" / "python3.12", "exit 127")  # as a shim of pyenv for a version that is not chosen
    command(tmp_path / "bin" / "pyenv", f"echo {tmp_path}/pyenv")
    assert pythons.find("3.12") is None
    command(tmp_path / "pyenv" / "versions" / "3.12.8rc1" / "bin" / "python3.12", "echo 3.12.8.candidate")
    own = command(tmp_path / "pyenv" / "versions" / "3.12.7" / "bin" / "python3.12", "echo 3.12.7.final")
    assert pythons.find("3.12") == pythons.Interpreter(own, "3.12.7")
    by_uv = command(tmp_path / "elsewhere", "echo 3.14.0.final")
    command(tmp_path / "bin" / "uv", f'[ "$2 $4" = "find 3.14" ] && echo {by_uv}')
    assert pythons.find("3.14") == pythons.Interpreter(by_uv, "3.14.0")
    assert pythons.find("3.13") is None


def test_a_source_that_warns_fails(pythons: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fine.py").write_text("x = 1\n")
    (tmp_path / "warns.py").write_text("x = '\\d'\n")
    monkeypatch.setattr(pythons, "SOURCES", (str(tmp_path),))
    outcome = pythons.check(pythons.Interpreter(Path(sys.executable), "3.11.0"))
    assert outcome.has_failed
    assert "warns.py" in outcome.output
    assert "fine.py" not in outcome.output
