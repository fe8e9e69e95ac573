"""The oracle of full.py, bounded: the known bodies once and a hundred mutated ones against a tiny model's server."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.oracles.orca_hostile.bodies import known, mutated
from tests.oracles.orca_hostile.full import report, run, running, tiny_model


def test_hostile_bodies_change_nobodys_answer_and_take_no_memory_for_good(tmp_path: Path) -> None:
    with running(tiny_model(tmp_path), 96) as url:
        seen = run(url, known(), name="known bodies")
        run(url, list(itertools.islice(mutated(seed=1), 100)), name="mutated bodies", seen=seen)
    assert report(seen), seen.bad[:5]
    assert seen.counts["refused"] > 50
    assert seen.counts["answered"] > 5
