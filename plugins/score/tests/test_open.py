"""``mlsys trace open``: a recording of the score as one page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_score.cli import app
from typer.testing import CliRunner


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return result.output


def test_open_makes_a_page_of_a_recording_and_refuses_another_file(tmp_path: Path) -> None:
    recording = {
        "format": "mlsys-score",
        "version": 1,
        "system": "orca",
        "unit": "iteration",
        "rows": [],
        "columns": [],
    }
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": []}))
    packed = tmp_path / "score.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(recording).encode()))
    assert f"wrote {tmp_path / 'score.html'}" in run(packed, "--no-open").replace("\n", "")
    page = (tmp_path / "score.html").read_text(encoding="utf-8")
    assert '"format":"mlsys-score"' in page
    assert "src=" not in page.split("<script")[0], "it loads nothing"
    (tmp_path / "later.json").write_text(json.dumps({**recording, "version": 2}))
    (tmp_path / "broken.json.gz").write_bytes(packed.read_bytes()[:40])
    for file, said in (
        (trace, "no recording of the score .*perfetto"),
        (tmp_path / "later.json", "version: Input should be 1"),
        (tmp_path / "broken.json.gz", "cannot read .*broken"),
        (tmp_path / "none.json", "cannot read .*none.json"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            run(file, "--no-open")
