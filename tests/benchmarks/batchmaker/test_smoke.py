"""Each suite at its smallest."""

from __future__ import annotations

import pytest
from mlsys_bench.batchmaker import suite, trees, words
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.models import find_entry
from rich.console import Console

QUICK = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)


@pytest.mark.skipif(find_entry("g2p-en").source.locate(settings().cache_dir) is None, reason="g2p-en is not here")
def test_words() -> None:
    data = words.run(QUICK).data
    assert list(data["latency_s"]) == [str(load) for load in words.LOADS]


def test_trees() -> None:
    cases = trees.run(QUICK, hidden=16).data["cases"]
    assert {"cellular", "per height", "ideal"} <= set(cases["trees of one shape"]["median"])


def test_figures_are_chosen_by_number() -> None:
    section = suite.run(QUICK, figures=("3",), hidden=16)
    assert list(section.data) == ["Figure 3: one step of the cell"]
