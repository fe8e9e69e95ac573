"""The suite's edges, and one small race in a process of its own."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_nimble.bench import suite
from mlsys_nimble.bench.child import relative_difference
from rich.console import Console


def context(device: str = "cpu") -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), is_quick=True, device=device, num_threads=1)


def test_a_difference_is_relative_to_the_largest_value():
    expected = [torch.tensor([0.0, 100.0]), torch.tensor([1.0])]
    assert relative_difference([torch.tensor([0.1, 100.0]), torch.tensor([1.0])], expected) == pytest.approx(1e-3)
    assert relative_difference([torch.tensor([0.0, 100.0])], expected) == float("inf")
    assert relative_difference([torch.zeros(3), torch.ones(1)], expected) == float("inf")
    assert relative_difference([torch.tensor([float("nan"), 100.0]), torch.ones(1)], expected) == float("inf")


def test_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert suite.interpreter(None) == Path(sys.executable)
    python = tmp_path / ".peers/nimble/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert suite.interpreter(None) == python
    assert suite.interpreter(python) == python
    with pytest.raises(InvalidInputError, match=r"requirements\.txt says how"):
        suite.interpreter(tmp_path / "nowhere")


def test_other_devices_are_refused():
    with pytest.raises(InvalidInputError, match="runs on cpu"):
        suite.run_nets(context("cuda"))


@pytest.mark.parametrize("wrong", ["no-such-net", "missing.pt2"])
def test_all_names_are_checked_before_the_first_race(wrong: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "race_in_child", lambda *_, **__: pytest.fail("a race has begun"))
    with pytest.raises(InvalidInputError, match=wrong):
        suite.run_nets(context(), nets=["mlp", wrong])


def test_what_a_race_dies_of_is_told():
    with pytest.raises(MlsysError, match="no net is called 'no-such-net'"):
        suite.race_in_child(
            "no-such-net", python=Path(sys.executable), num_threads=1, seconds=0, is_quick=True, say=lambda line: None
        )


def test_a_race(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "QUICK_SECONDS", 0.0)
    section = suite.run_nets(context(), nets=["mlp"], peers=Path(sys.executable))
    contestants = section.data["nets"]["mlp"]["contestants"]
    assert section.status == "ok"
    assert contestants["eager"]["status"] == contestants["Nimble"]["status"] == "timed"
    assert contestants["Nimble"]["difference"] <= 1e-5
    assert contestants["torch.compile"]["status"] == "left out"
