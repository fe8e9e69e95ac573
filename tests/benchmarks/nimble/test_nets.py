"""Nimble's suite: what it refuses, one small race in a process of its own, and the report of made-up outcomes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import nets, races
from mlsys_bench.nimble.nets import ratios, report
from mlsys_bench.nimble.races import relative_difference
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Table
from rich.console import Console


def context(folder: Path) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", 1, folder)


def test_a_difference_is_relative_to_the_largest_value():
    expected = [torch.tensor([0.0, 100.0]), torch.tensor([1.0])]
    assert relative_difference([torch.tensor([0.1, 100.0]), torch.tensor([1.0])], expected) == pytest.approx(1e-3)
    assert relative_difference([torch.tensor([0.0, 100.0])], expected) == float("inf")
    assert relative_difference([torch.zeros(3), torch.ones(1)], expected) == float("inf")
    assert relative_difference([torch.tensor([float("nan"), 100.0]), torch.ones(1)], expected) == float("inf")


@pytest.mark.parametrize("wrong", ["no-such-net", "missing.pt2"])
def test_all_names_are_checked_before_the_first_race(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(races, "run_in_child", lambda *_, **__: pytest.fail("a race has begun"))
    with pytest.raises(InvalidInputError, match=wrong):
        nets.run(context(tmp_path), nets=("mlp", wrong))


def test_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nets, "QUICK_SECONDS", 0.0)
    section = nets.run(context(tmp_path), nets=("mlp",), peers=sys.executable)
    cases = section.data["nets"]["mlp"]["cases"]
    assert section.status == "ok"
    assert cases["eager"]["status"] == cases["Nimble"]["status"] == "timed"
    assert cases["Nimble"]["difference"] <= 1e-5
    assert cases["torch.compile"]["status"] == "left out"


def timed(milliseconds: float) -> Outcome:
    return Outcome("timed", "", 1e-7, 0.5, ((milliseconds / 1e3,) * 3,))


RACE = {
    "eager": timed(8),
    "torch.compile": Outcome("does not run", "RuntimeError: no compiler"),
    "ONNX Runtime": timed(4),
    "OpenVINO": timed(3),
    "Nimble, one stream": timed(2.5),
    "Nimble": timed(2),
}


def test_ratios_are_to_the_best_peer_and_to_eager():
    assert ratios(RACE) == pytest.approx((1.5, 4.0))
    assert ratios({**RACE, "Nimble": Outcome("differs")}) == (None, None)
    assert ratios({"eager": timed(8), "Nimble": timed(2)}) == (None, pytest.approx(4.0))


def test_the_report_has_every_case_and_every_reason():
    section = report({"darts": RACE, "mlp": {**RACE, "Nimble": timed(8)}}, num_threads=2)
    table, everybody = (item for item in section.body if isinstance(item, Table))
    assert table.rows[0] == ["darts", "8", "OpenVINO", "2.5", "2", "1.50x", "4.00x"]
    assert everybody.columns[0] == "median ms"
    assert everybody.columns[1:] == list(RACE)
    assert everybody.rows[0] == ["darts", "8", "does not run", "4", "3", "2.5", "2"]
    text = " ".join(item for item in section.body if isinstance(item, str))
    assert "torch.compile: does not run (RuntimeError: no compiler) on darts, mlp" in text
    assert "2.00x eager's" in text  # of 4 and 1
    data = json.loads(json.dumps(section.data))
    assert data["nets"]["darts"]["best_peer"] == "OpenVINO"
    assert data["nets"]["darts"]["cases"]["Nimble"]["median_s"] == pytest.approx(0.002)
    assert section.status == "ok"


def test_a_wrong_result_of_ours_fails_the_suite():
    wrong = {**RACE, "Nimble": Outcome("differs", "by 1.0e-01 of the largest value")}
    assert report({"darts": wrong}, num_threads=2).status == "failed"
    peer = {**RACE, "OpenVINO": Outcome("differs")}
    assert report({"darts": peer}, num_threads=2).status == "ok"
