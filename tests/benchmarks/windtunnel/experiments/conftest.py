"""A small task of numbers and words, in which the label follows from both."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from mlsys_bench.windtunnel.experiments import nearby
from mlsys_bench.windtunnel.experiments.data import Part, Task


def make_part(rows: int, seed: int) -> Part:
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(rows, 2))
    towns = rng.integers(0, 30, rows)
    frame = pd.DataFrame(
        {"one": numbers[:, 0], "two": numbers[:, 1], "town": np.array([f"town{n:02d}" for n in towns], dtype=object)}
    )
    score = numbers[:, 0] + (towns % 3 - 1) * 1.5 + rng.normal(size=rows) * 0.3
    return Part(frame, (score > 0).astype(np.float64))


@pytest.fixture(scope="session")
def task() -> Task:
    return Task("towns", ("one", "two"), ("town",), make_part(1500, 0), make_part(400, 1), make_part(400, 2))


@pytest.fixture
def towns(task: Task, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(nearby, "NEARBY", (("town", "one", {"width": 0.5, "before": 2, "after": 1}),))
    return task
