"""``mlsys demo``: its steps find the report's folder, which was not there before."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_core.cli.main import run
from mlsys_core.demo import DemoContext
from mlsys_core.report import Section


def test_steps_may_write_beside_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_steps(_: object, context: DemoContext) -> list[Section]:
        (context.output_dir / "picture.png").write_bytes(b"")
        return []

    monkeypatch.setattr("mlsys_core.demo.run_steps", run_steps)
    assert run(["demo", "--report", str(tmp_path / "new" / "demo.html")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"demo.html", "picture.png"}
