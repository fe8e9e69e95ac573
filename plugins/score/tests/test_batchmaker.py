"""Rounds of cells, and batches of streams' frames, on the score."""

from __future__ import annotations

import numpy as np
from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.lstm import StackedLSTMCell
from mlsys_batchmaker.engine import Engine
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_batchmaker.streams.frames import StreamConfig
from mlsys_batchmaker.streams.model import stream_of
from mlsys_score.board import Board


def test_each_round_is_a_column() -> None:
    with Engine(lstm_model(num_words=9, hidden_size=8)) as engine:
        board = Board(system="batchmaker", unit="round", sources=lambda: [engine.score_source])
        engine.submit({"words": np.array([1])}).result()  # nobody looks: it is kept
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
    assert [row["reason"] for row in data["rows"]] == ["done"] * 4
    assert {square[0] for column in data["columns"] for square in column["squares"]} == {1, 2, 3, 4}
    assert {column["label"] for column in data["columns"]} == {engine.model.layout.cells[0].name}
    assert all(list(column["split"]) == [column["label"]] for column in data["columns"])


def test_each_batch_of_frames_is_a_column() -> None:
    cell = make_cell("voice", StackedLSTMCell(8, 16, 1))
    stream = stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0")
    with StreamEngine(stream, StreamConfig(num_workers=1)) as engine:
        board = Board(system="batchmaker", unit="round", sources=lambda: [engine.score_source])
        engine.run(np.zeros((3, 8), dtype=np.float32))  # before anybody looks
        board.look()
        engine.run(np.zeros((2, 8), dtype=np.float32))
    data = board.snapshot()
    assert [(row["name"], row["reason"]) for row in data["rows"]] == [("1", "done"), ("2", "done")]
    squares = [square.row for column in data["columns"] for square in column["squares"]]
    assert squares == [1, 1, 1, 2, 2]
    assert {column["label"] for column in data["columns"]} == {stream.spec.name}


def test_streams_are_on_the_score_until_they_end() -> None:
    cell = make_cell("voice", StackedLSTMCell(8, 16, 1))
    stream = stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0")
    with StreamEngine(stream, StreamConfig(max_streams=2, idle_timeout_s=0.0)) as engine:
        board = Board(system="batchmaker", unit="round", sources=lambda: [engine.score_source])
        board.look()
        engine.open("stays", lambda answers: None)
        engine.open("leaves", lambda answers: None)
        engine.close_stream("leaves")
        assert [row["reason"] for row in board.snapshot()["rows"]] == [None, "done"]
        engine.end_idle()
        assert [row["reason"] for row in board.snapshot()["rows"]] == ["done", "done"]
