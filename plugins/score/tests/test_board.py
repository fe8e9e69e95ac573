"""The board: a ring, read by cursors, that engines write to while somebody looks."""

from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.engine.watching.feed import PrefillSplit
from mlsys_score.board import Board
from mlsys_score.recording import parse_recording
from mlsys_serving.tracing import EngineTraces
from mlsys_serving.watch import BatchSource, Kind, Square
from mlsys_serving.watch_log import NUM_KEPT


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_board(clock: Clock | None = None, **options: object) -> Board:
    return Board(system="orca", unit="iteration", clock=clock or Clock(), **options)  # type: ignore[arg-type]


def add(board: Board, *squares: Square, start_s: float = 100.0, **options: object) -> None:
    board.add(start_s, start_s + 0.01, squares, split_ms={"decode": 10.0}, **options)  # type: ignore[arg-type]


def test_a_snapshot_is_a_recording():
    clock = Clock()
    board = make_board(clock, facts=lambda: {"model": "m"})
    board.opened("chatcmpl-12345678", num_prompt_tokens=5, max_new_tokens=9)
    clock.now_s = 100.5
    row = board.row("chatcmpl-12345678")
    add(board, Square(row.number, Kind.PREFILL, 5), start_s=100.2, tables={row.number: (3, 4)}, num_free_blocks=6)
    board.closed("chatcmpl-12345678", "stop")
    recording = parse_recording(json.dumps(board.snapshot()))
    assert recording.facts == {"model": "m"}
    assert recording.rows[0].model_dump() == {
        "row": 1,
        "name": "12345678",
        "opened": 0.0,
        "prompt": 5,
        "max_new": 9,
        "cached": 0,
        "ended": 500.0,
        "reason": "stop",
    }
    column = recording.columns[0]
    assert (column.t, column.ms, column.free, column.waiting) == (200.0, 10.0, 6, 0)
    assert column.squares == [(1, "p", 5, 0)]
    assert column.tables == [(1, 0, [3, 4])]


def test_who_waits_is_counted():
    board = make_board()
    for name in "abc":
        board.opened(name)
    add(board, Square(board.row("a").number, Kind.PREFILL, 3))
    add(board, Square(board.row("a").number, Kind.PREEMPTED, 0), Square(board.row("b").number, Kind.PREFILL, 3))
    board.closed("c", "abort")
    assert [column["waiting"] for column in board.snapshot()["columns"]] == [2, 2], "b and c; then a and c"
    assert board.snapshot()["waiting"] == 1


def test_a_cursor_reads_each_event_once_and_an_old_one_gets_a_snapshot():
    board = make_board(max_columns=4)
    row = board.row("a").number
    _, cursor, is_snapshot = board.read(None)
    assert is_snapshot
    add(board, Square(row, Kind.DECODE, 1))
    delta, cursor, is_snapshot = board.read(cursor)
    assert not is_snapshot
    assert [column["n"] for column in delta["columns"]] == [1]
    assert delta["rows"] == []
    board.closed("a", "stop")
    delta, cursor, _ = board.read(cursor)
    assert delta["columns"] == []
    assert [each["reason"] for each in delta["rows"]] == ["stop"]
    for _ in range(5):
        add(board, Square(row, Kind.DECODE, 1))
    data, _, is_snapshot = board.read(cursor)
    assert is_snapshot
    assert [column["n"] for column in data["columns"]] == [3, 4, 5, 6]


@given(
    tables=st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=5)), max_size=30),
    size=st.integers(1, 6),
)
def test_the_ring_keeps_the_block_tables(tables: list[tuple[int, list[int]]], size: int):
    board = make_board(max_columns=size)
    rows = {number: board.row(f"request {number}").number for number in (1, 2, 3)}
    latest: dict[int, list[int]] = {}
    for number, blocks in tables:
        row = rows[number]
        add(board, Square(row, Kind.DECODE, 1), tables={row: tuple(blocks)})
        latest[row] = blocks
    data = board.snapshot()
    found = {row: list(blocks) for row, blocks in data["tables"]}
    for column in data["columns"]:
        for row, first, blocks in column.get("tables", ()):
            found[row] = [*found.get(row, [])[:first], *blocks]
    assert {row: blocks for row, blocks in found.items() if blocks} == {
        row: blocks for row, blocks in latest.items() if blocks
    }


def watched(**options: object) -> tuple[EngineTraces, Board]:
    source = BatchSource(label_of=lambda _: "stage 1")
    traces = EngineTraces(lambda batch: batch, watcher=source)
    return traces, Board(system="dvabatch", unit="task", sources=lambda: [source], **options)  # type: ignore[arg-type]


def test_engines_write_to_the_board_while_somebody_looks():
    traces, board = watched()
    board.look()
    board.look()
    traces.open("a", operation="infer", model="m")
    traces.on_batch(["a"], 1.0, 1.5)
    traces.close("a", "done")
    board.look_away()
    board.rest()
    assert board.is_watched, "one still looks"
    board.look_away()
    board.rest()
    assert not board.is_watched
    traces.on_batch(["b"], 2.0, 2.5)
    data = board.snapshot()
    assert [column["split"] for column in data["columns"]] == [{"stage 1": 500.0}], "nobody looks: b is kept only"
    assert [row["reason"] for row in data["rows"]] == ["done"]
    board.look()
    assert [column["squares"][0].row for column in board.snapshot()["columns"]] == [1, 2], "the score goes on"


def test_the_first_viewer_sees_what_has_just_happened():
    traces, board = watched()
    traces.open("a", operation="infer", model="m")
    began = time.perf_counter()
    traces.on_batch(["a"], began, time.perf_counter())
    traces.close("a", "done")
    assert not board.snapshot()["columns"]
    board.look()
    data = parse_recording(json.dumps(board.snapshot()))
    assert [(row.name, row.reason) for row in data.rows] == [("a", "done")]
    assert data.rows[0].opened == 0.0, "the score begins with what was kept first"
    assert 0.0 <= data.columns[0].t <= data.now
    assert data.columns[0].squares == [(1, "d", 1, 0)]
    assert data.waiting == 0


def test_what_was_kept_is_bounded_and_a_gap_begins_the_score_anew():
    traces, board = watched()
    board.look()
    traces.on_batch(["early"], 0.0, 0.5)
    board.look_away()
    board.rest()
    for number in range(NUM_KEPT + 10):
        traces.on_batch(["late"], number + 1.0, number + 1.5)
    board.look()
    columns = board.snapshot()["columns"]
    assert len(columns) == NUM_KEPT
    assert (columns[0]["t"], columns[-1]["t"]) == (0.0, 1000.0 * (NUM_KEPT - 1))


def test_sources_are_told_in_order_of_time():
    sources = [BatchSource(label_of=lambda batch: batch), BatchSource(label_of=lambda batch: batch)]
    board = Board(system="dvabatch", unit="task", sources=lambda: sources)
    for number in range(6):
        sources[number % 2].ran(f"task {number}", ["a"], number, number + 0.5)
    board.look()
    assert [column["label"] for column in board.snapshot()["columns"]] == [f"task {number}" for number in range(6)]


def test_no_event_is_lost_while_viewers_come_and_go():
    traces, board = watched(max_columns=100_000)
    counts = [0, 0]

    def run(thread: int) -> None:
        for number in range(400):
            traces.on_batch([f"request {thread}"], number, number + 0.5)
            counts[thread] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        board.look()
        board.look_away()
        board.rest()
    board.look()
    columns = board.snapshot()["columns"]
    assert counts == [400, 400]
    assert len(columns) <= 800
    if len(columns) < 800:  # so much came between two looks that the ring ran over
        assert len(columns) >= NUM_KEPT
    for row in {square.row for column in columns for square in column["squares"]}:
        times = [column["t"] for column in columns if column["squares"][0].row == row]
        assert times == sorted(times)


def test_prefills_are_charged_what_decodes_alone_would_not_have_taken():
    split = PrefillSplit()
    assert split.divide(30.0, num_decode_rows=1, num_prefill_rows=2) == {"decode": 10.0, "prefill": 20.0}
    for n in range(1, 9):
        assert split.divide(8.0 + 2 * n, num_decode_rows=n, num_prefill_rows=0) == {"decode": 8.0 + 2 * n}
    parts = split.divide(100.0, num_decode_rows=16, num_prefill_rows=64)
    assert parts["decode"] == pytest.approx(40.0)
    assert sum(parts.values()) == pytest.approx(100.0)
    assert split.divide(9.0, num_decode_rows=16, num_prefill_rows=64)["prefill"] == 0.0
    assert split.divide(50.0, num_decode_rows=0, num_prefill_rows=64) == {"prefill": 50.0}
