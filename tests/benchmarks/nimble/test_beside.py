"""Calls in company: the company comes and goes, calls are counted, and losses lead the report."""

from __future__ import annotations

import io
import sys
import threading

import psutil
import pytest
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import beside
from mlsys_bench.nimble.company import COMPANIES, Company, call_together, keep, other_pools
from mlsys_core.bench import BenchContext
from mlsys_core.report import Table
from rich.console import Console


def nothing() -> None:
    pass


def test_busy_processes_end_with_their_company():
    others = set(psutil.Process().children())
    with keep(Company("", busy_per_core=2), nothing) as before:
        busy = set(psutil.Process().children()) - others
        assert before is None
    assert busy
    assert not any(process.is_running() for process in busy)


def test_callers_call_at_the_same_time():
    inside, together = threading.Barrier(3, timeout=600), list[int]()

    def call() -> None:
        together.append(inside.wait())

    samples = call_together(call, 3, 0.0)
    assert len(samples) == 3
    assert sorted(together) == [0, 0, 1, 1, 2, 2]  # once before the clock starts, once timed


def test_the_other_pools_are_named():
    stir, names = other_pools(1)
    stir()
    assert names[0] == "torch"


def outcomes(ours: list[float], theirs: list[float]) -> dict[str, Outcome]:
    return {
        "Nimble": Outcome("timed", turns_s=(tuple(ours),)),
        "ONNX Runtime": Outcome("timed", turns_s=(tuple(theirs),)),
        "OpenVINO": Outcome("not installed", "no package openvino"),
    }


def test_losses_lead():
    races = {
        "a": {"alone": outcomes([1.0] * 200, [2.0] * 200)},
        "b": {"alone": outcomes([1.0] * 190 + [9.0] * 10, [2.0] * 200)},  # faster in the median, slower in the tail
    }
    section = beside.report(races, 2, "quiet")
    table = section.body[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["b", "a"]
    assert beside.ratios(races["b"]["alone"]) == (2.0, pytest.approx(2 / 9))
    assert "OpenVINO: not installed (no package openvino) on a, b" in section.body


def test_a_race_in_every_company(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beside, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(beside, "TURN_S", 0.0)
    context = BenchContext(Console(file=io.StringIO()), is_quick=True, device="cpu", num_threads=1)
    section = beside.run(context, nets=("mlp",), peers=sys.executable)
    assert section.status == "ok"
    found = section.data["nets"]["mlp"]
    assert list(found) == [company.name for company in COMPANIES]
    assert all(one["cases"]["Nimble"]["p99_s"] > 0 for one in found.values())
