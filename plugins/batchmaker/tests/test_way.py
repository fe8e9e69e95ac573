"""The page ``docs/ways/cell.md`` lists the files that a request passes, from the engine to the kernel and back."""

from __future__ import annotations

import numpy as np
from mlsys_batchmaker.engine import Engine
from mlsys_batchmaker.models.sequence import lstm_model

from tests.ways import ROOT, files_of_page, files_passed, num_lines

PAGE = "docs/ways/cell.md"


def test_a_cells_way():
    model, engines = lstm_model(num_words=9, hidden_size=8), []

    def start() -> None:
        engines.append(Engine(model))

    def call() -> None:
        engines[-1].submit({"words": np.array([1, 2, 3])}).result()

    start(), call()  # the plan is made once
    passed = files_passed(call, start=start)
    for engine in engines:
        engine.close()
    assert sorted(files_of_page(PAGE)) == sorted(passed)
    assert f"{len(passed)} Python files" in (ROOT / PAGE).read_text()
    assert num_lines(passed) < 5300
