"""Search and training at their smallest."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_bench.windtunnel import search, training
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.models import find_entry
from rich.console import Console


def context(folder: Path) -> BenchContext:
    return BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1, output_dir=folder)


def test_a_training_step_is_the_same_in_both_forms(tmp_path: Path) -> None:
    section = training.run(context(tmp_path), batch=256, chunk=128)
    assert section.status == "ok"
    assert len(section.data["rows_per_s"]) == 2 * len(training.LEVELS)


@pytest.mark.skipif(find_entry("adult").source.locate(settings().cache_dir) is None, reason="adult is not here")
def test_search_goes_on_with_its_journal(tmp_path: Path) -> None:
    sets = "lr=.002,init=source,batch_size=512"
    (first,) = search.run(context(tmp_path), sets=sets, data="adult").data["tried"]
    assert len(first["valid_by_epoch"]) == 1 + 1
    both = search.run(context(tmp_path), sets=f"{sets} {sets},lr=.001", data="adult").data["tried"]
    assert both[0] == first
    assert both[1]["options"]["lr"] == 0.001
