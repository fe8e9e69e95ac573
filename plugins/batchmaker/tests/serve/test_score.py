"""Rounds of cells on the score."""

from __future__ import annotations

import numpy as np
from mlsys_batchmaker.engine import Engine
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_core.serving.score import Board


def test_each_round_is_a_column() -> None:
    with Engine(lstm_model(num_words=9, hidden_size=8)) as engine:
        board = Board(system="batchmaker", unit="round", sources=lambda: [engine.score_source])
        engine.submit({"words": np.array([1])}).result()
        assert "<caption>" in engine._repr_html_()
        assert '<th scope="row">unfinished</th><td>0</td>' in engine._repr_html_()
        board.look()
        futures = [engine.submit({"words": np.arange(1, 3 + n) % 9}) for n in range(3)]
        for future in futures:
            future.result()
        board.look_away()
        board.rest()
        engine.submit({"words": np.array([1])}).result()
    data = board.snapshot()
    assert [row["reason"] for row in data["rows"]] == ["done"] * 3
    assert {square[0] for column in data["columns"] for square in column["squares"]} == {1, 2, 3}
    assert {column["label"] for column in data["columns"]} == {engine.model.layout.cells[0].name}
    assert all(list(column["split"]) == [column["label"]] for column in data["columns"])
