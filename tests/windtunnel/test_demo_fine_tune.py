"""The demo's second step, on a small table: it says what it trained, and AUC before and after."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlsys_core.demo import DemoContext
from mlsys_core.report import Figure, Table
from mlsys_windtunnel.cli import demo_fine_tune
from mlsys_windtunnel.cli.demo import Dataset
from rich.console import Console


def test_the_step_trains_a_pipeline_further(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"distance": rng.normal(size=500), "origin": rng.choice(list("abcdefgh"), 500)})
    target = (frame.distance + (frame.origin < "d") + rng.normal(size=500) > 0.5).to_numpy(int)
    data = Dataset("flights", "is it late?", frame, target, few=(), many=("origin",))
    monkeypatch.setattr(demo_fine_tune, "load_dataset", lambda cache_dir, max_rows: data)
    for name, value in (("NUM_TREES", 4), ("NUM_LEAVES", 6), ("EPOCHS", 2)):
        monkeypatch.setattr(demo_fine_tune, name, value)
    context = DemoContext(Console(file=io.StringIO(), width=120), tmp_path, num_threads=1, output_dir=tmp_path)
    section = demo_fine_tune.run(context)
    assert section.data["training_rows"] == 350
    assert 0.5 < section.data["auc_before"] < 1
    assert 0.5 < section.data["auc_after"] < 1
    (table,) = [part for part in section.body if isinstance(part, Table)]
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    assert any(isinstance(part, Figure) for part in section.body)
