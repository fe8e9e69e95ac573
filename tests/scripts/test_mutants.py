"""Deliberate faults are made in files that exist, and tests that exist are to notice them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)


def test_every_area_names_what_is_there():
    assert mutants.missing() == []


def test_a_pattern_that_matches_nothing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    area = mutants.Area(mutants.ORCA, ("scheduling/none.py",), ("tests/orca/test_none.py",))
    monkeypatch.setattr(mutants, "AREAS", {"x": area})
    monkeypatch.setattr(sys, "argv", ["mutants.py", "x"])
    with pytest.raises(SystemExit):
        mutants.main()
    error = capsys.readouterr().err
    assert f"{mutants.ORCA}/scheduling/none.py, tests/orca/test_none.py" in error
