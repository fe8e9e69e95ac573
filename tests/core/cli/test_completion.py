"""Names of models and data, and files, behind a command in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlsys_core.cli import completion


def complete(line: str, folder: Path) -> list[str]:
    """Return what bash would offer at the end of ``line``."""
    words = line.split(" ")
    environment = {"_MLSYS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [str(Path(sys.executable).with_name("mlsys"))]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=folder, timeout=60)
    return done.stdout.split()


def test_a_shell_offers_models(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert complete("mlsys orca serve smoll", tmp_path) == ["smollm2-135m-instruct"]
    assert complete("mlsys orca serve sma", tmp_path) == ["small.gguf"]
    assert complete("mlsys models path adul", tmp_path) == ["adult"]
    assert complete("mlsys orca ser", tmp_path) == ["serve"]


def test_paths_lead_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny.gguf").touch()
    (tmp_path / "models" / ".hidden").mkdir()
    assert completion.models("mod") == ["models/"]
    assert completion.models("models/") == ["models/tiny/", "models/tiny.gguf"]
    assert completion.models(f"{tmp_path}/models/tiny.") == [f"{tmp_path}/models/tiny.gguf"]
    assert completion.models("no/such/") == []
    assert "adult" in completion.names("")
    assert "adult" not in completion.models("")
