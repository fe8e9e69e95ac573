"""Nimble's suite: what it refuses, and one small race in a process of its own."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from mlsys_bench.nimble import nets
from mlsys_bench.nimble.nets import relative_difference
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from rich.console import Console


def context(device: str = "cpu") -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), is_quick=True, device=device, num_threads=1)


def test_a_difference_is_relative_to_the_largest_value():
    expected = [torch.tensor([0.0, 100.0]), torch.tensor([1.0])]
    assert relative_difference([torch.tensor([0.1, 100.0]), torch.tensor([1.0])], expected) == pytest.approx(1e-3)
    assert relative_difference([torch.tensor([0.0, 100.0])], expected) == float("inf")
    assert relative_difference([torch.zeros(3), torch.ones(1)], expected) == float("inf")
    assert relative_difference([torch.tensor([float("nan"), 100.0]), torch.ones(1)], expected) == float("inf")


@pytest.mark.parametrize("wrong", ["no-such-net", "missing.pt2"])
def test_all_names_are_checked_before_the_first_race(wrong: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nets, "run_in_child", lambda *_, **__: pytest.fail("a race has begun"))
    with pytest.raises(InvalidInputError, match=wrong):
        nets.run(context(), nets=("mlp", wrong))


def test_a_race(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nets, "QUICK_SECONDS", 0.0)
    section = nets.run(context(), nets=("mlp",), peers=sys.executable)
    cases = section.data["nets"]["mlp"]["cases"]
    assert section.status == "ok"
    assert cases["eager"]["status"] == cases["Nimble"]["status"] == "timed"
    assert cases["Nimble"]["difference"] <= 1e-5
    assert cases["torch.compile"]["status"] == "left out"
