"""The batch table by itself: rows, parts, and what children of a split inherit."""

from __future__ import annotations

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.scheduling.table import BatchTable, Part


def test_a_row_begins_with_nothing_done():
    table = BatchTable(num_stages=3)
    row = table.new(["a", "b"], created_s=1.5)
    assert (row.batch_id, row.created_s, row.num_stages, row.padded_length) == (0, 1.5, 3, 1)
    assert (row.can_stretch, row.held_after, row.follows, row.is_passing, row.pair) == (True, None, None, False, None)
    assert (row.progress, row.size, row.status_map) == ({"a": 0, "b": 0}, 2, (0, 0, 0))
    other = table.new(["c"], created_s=2.0, padded_length=7, can_stretch=False)
    assert (other.batch_id, other.padded_length, other.can_stretch) == (1, 7, False)
    assert (table[0], table[1], table.latest, table.num_requests) == (row, other, other, 3)
    assert table.batch_of == {"a": 0, "b": 0, "c": 1}


def test_an_empty_table_has_no_latest_row():
    table = BatchTable(num_stages=1)
    assert (table.latest, table.num_requests) == (None, 0)
    for num_stages in (0, -1):
        with pytest.raises(InvalidInputError, match=f"num_stages={num_stages}: a model has at least 1 stage"):
            BatchTable(num_stages)


def test_the_status_map_counts_who_has_completed_each_stage():
    row = BatchTable(num_stages=3).new(["a", "b", "c"], created_s=0.0)
    row.progress |= {"a": 3, "b": 1}
    assert row.status_map == (2, 1, 1)


def test_a_part_says_where_its_first_request_stands():
    row = BatchTable(num_stages=1).new(["a", "b", "c"], created_s=0.0)
    assert row.part() == Part(0, 0, ("a", "b", "c"))
    part = row.part(["b", "c"])
    assert (part.item, part.num, part.requests) == ((0, 1, 2), 2, ("b", "c"))


def test_the_latest_row_is_stretched():
    table = BatchTable(num_stages=2)
    table.new(["a"], created_s=0.0)
    row = table.new(["b"], created_s=0.0)
    row.progress["b"] = 1
    assert table.stretch(["c", "d"]) is row
    assert row.progress == {"b": 1, "c": 0, "d": 0}
    assert table.batch_of["d"] == 1
    table.drop(row)
    assert (table.latest, table.num_requests) == (table[0], 1)


def test_no_request_is_in_two_batches():
    table = BatchTable(num_stages=1)
    table.new(["a"], created_s=0.0)
    for add in (lambda: table.new(["a"], created_s=0.0), lambda: table.stretch(["a"])):
        with pytest.raises(InvalidInputError, match="request 'a' is in batch 0 already"):
            add()


def split_of(*, serial: bool) -> tuple[BatchTable, list[int]]:
    table = BatchTable(num_stages=4)
    table.new(["x"], created_s=0.0)
    parent = table.new(["a", "b", "c"], created_s=2.5, padded_length=9)
    follower = table.new(["y"], created_s=3.0)
    parent.progress = dict.fromkeys("abc", 2)
    parent.pair, parent.follows, follower.follows = 1, 0, parent.batch_id
    children = table.split(parent, [["a"], ["c"], ["b"]], serial=serial)
    for child in children:
        assert (child.created_s, child.padded_length, child.num_stages) == (2.5, 9, 4)
        assert (child.can_stretch, child.pair, child.held_after) == (False, 1, None)
        assert table[child.batch_id] is child
    assert [child.progress for child in children] == [{"a": 2}, {"c": 2}, {"b": 2}]
    assert [table.batch_of[request] for request in "abc"] == [3, 5, 4]
    assert list(table.rows) == [0, 2, 3, 4, 5]
    assert follower.follows == 5, "whoever followed the parent follows its last child"
    assert table[0].follows is None
    return table, [child.follows for child in children]


def test_children_run_one_after_another_or_all_after_whom_the_parent_followed():
    assert split_of(serial=True)[1] == [0, 3, 4]
    table, follows = split_of(serial=False)
    assert follows == [0, 0, 0]
    assert table.new(["z"], created_s=0.0).batch_id == 6, "no number is given twice"


def test_a_request_leaves_its_row_and_the_row_stays():
    table = BatchTable(num_stages=1)
    row = table.new(["a", "b"], created_s=0.0)
    assert table.remove("a") is row
    assert (row.progress, table.batch_of, table.num_requests) == ({"b": 0}, {"b": 0}, 1)
    table.remove("b")
    assert table.latest is row
    table.drop(row)
    assert not table.rows
    assert table.new(["a"], created_s=0.0).batch_id == 1
