from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from mlsys_bench.windtunnel import distil
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from rich.console import Console


def _context(folder: Path) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=folder)


def test_a_share_of_the_teachers_gain_is_kept(tmp_path: Path):
    found = distil.run(_context(tmp_path), trees=3, data=("breast-cancer",)).data["results"]["breast-cancer"]
    assert set(found["scores"]) == set(distil.CONTESTANTS)
    assert all(0.9 < score <= 1 for scores in found["scores"].values() for score in scores)
    pipeline, distilled, teacher = (found["scores"][name][0] for name in ("pipeline", "distilled", "teacher"))
    np.testing.assert_allclose(found["share"], (distilled - pipeline) / (teacher - pipeline))


def test_a_set_of_numbers_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="'california' is no set of classes here; there are flights-3m"):
        distil.run(_context(tmp_path), data=("california",))
