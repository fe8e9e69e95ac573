"""Nimble's step of the demo, on the smaller of its nets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from mlsys_core.demo import DemoContext
from mlsys_core.report import Figure, Table
from mlsys_nimble.cli import demo
from rich.console import Console


def test_it_compares_times_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "NETS", ("six-branch",))
    monkeypatch.setattr(demo, "BUDGET_S", 0.0)
    console = Console(file=io.StringIO(), width=200)
    threads = torch.get_num_threads()
    section = demo.run(DemoContext(console, tmp_path, num_threads=1, output_dir=tmp_path))
    assert torch.get_num_threads() == threads
    assert section.status == "ok"
    assert section.data["difference"] <= 1e-5
    assert section.data["six-branch"]["degree_of_logical_concurrency"] == 6
    assert any(isinstance(item, Table) for item in section.body)
    assert sum(isinstance(item, Figure) for item in section.body) == 1
