"""The journal goes on where it was stopped, and only with the same setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_bench.harness.journal import Journal
from mlsys_core.errors import InvalidInputError


def test_a_restart_goes_on(tmp_path: Path):
    path = tmp_path / "new" / "cells.jsonl"
    journal = Journal(path, {"rows": (1, 2)}, key="cell")
    journal.add({"cell": "a", "score": 0.5})
    with path.open("a") as file:
        file.write('{"cell": "b", "sco')  # a run ended here
    again = Journal(path, {"rows": [1, 2]}, key="cell")
    assert again.finished == {"a": {"cell": "a", "score": 0.5}}
    again.add({"cell": "b", "score": 1.0})
    assert list(Journal(path, {"rows": [1, 2]}, key="cell").finished) == ["a", "b"]


def test_another_setting_or_another_file_is_refused(tmp_path: Path):
    path = tmp_path / "cells.jsonl"
    Journal(path, {"rows": 1}, key="cell").begin()
    with pytest.raises(InvalidInputError, match="another setting"):
        Journal(path, {"rows": 2}, key="cell")
    path.write_text("not JSON\n")
    with pytest.raises(InvalidInputError, match="no journal"):
        Journal(path, {"rows": 1}, key="cell")
