"""The demo step, on fewer words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from mlsys_batchmaker.cli import demo
from mlsys_core.config import settings
from mlsys_core.demo import DemoContext
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from rich.console import Console

try:
    resolve_model("g2p-en", settings().cache_dir)
    IS_HERE = True
except MissingDependencyError:
    IS_HERE = False


def test_the_words_are_real_and_different():
    words = demo.real_words(300)
    assert len(set(words)) == 300
    assert words == demo.real_words(300)
    assert {"json", "the"} & set(demo.real_words(10_000))


@pytest.mark.model
@pytest.mark.skipif(not IS_HERE, reason="the wheel g2p-en is not installed")
def test_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(demo, "NUM_WORDS", 40)
    out = io.StringIO()
    section = demo.run(DemoContext(Console(file=out), tmp_path, 1, tmp_path))
    assert section.status == "ok"
    assert "B AE1 CH IH0 NG" in out.getvalue()
    assert set(section.data["latency_s"]) == {"cellular", "bucketed"}
