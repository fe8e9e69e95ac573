from __future__ import annotations

import io
from pathlib import Path

import pytest
from mlsys_bench.windtunnel import public
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from rich.console import Console


def _context(folder: Path) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=folder)


def test_a_set_is_scored_for_each_contestant(tmp_path: Path):
    section = public.run(_context(tmp_path), data=("breast-cancer",))
    found = section.data["results"]["breast-cancer"]
    assert set(found["scores"]) == set(public.CONTESTANTS)
    assert all(0.9 < score <= 1 for scores in found["scores"].values() for score in scores)
    assert found["gain_se"] is None, "one seed has no error"
    if not found["epochs"][0]:
        assert found["scores"]["fine-tuned"] == found["scores"]["source"], "the source is kept as it is"


def test_an_unknown_set_is_named(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="'iris' is no public set here; there are flights-3m"):
        public.run(_context(tmp_path), data=("iris",))
