"""The queue of ready nodes against a sorted list, and the tables that grow beside it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.tables import Tables

from .reference import Queue

ACTS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 5)),
    st.tuples(st.just("append each"), st.integers(1, 5)),
    st.tuples(st.just("drop"), st.integers(0, 6)),
    st.tuples(st.just("put back"), st.lists(st.integers(0, 30), max_size=5)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 30), max_size=4)),
    st.tuples(st.just("make room"), st.integers(0, 9)),
)


def held(queue: SimpleNamespace) -> list[tuple[int, int]]:
    """Return the queue as compiled code reads it: (node, rank), first to last."""
    columns = []
    for address in (queue.nodes, queue.ranks):
        memory = (ctypes.c_int64 * queue.room).from_address(address)
        columns.append(list(memory)[queue.head : queue.tail])
    return list(zip(*columns, strict=True))


@given(st.lists(ACTS, max_size=40), st.integers(2, 8))
def test_it_is_a_list_sorted_by_rank(acts: list[tuple[str, object]], room: int):
    queue = SimpleNamespace()
    ready = Queue(queue, room)
    expected: list[tuple[int, int]] = []
    node, rank = 100, 31  # those put back have lower ranks, or equal ones
    for act, given_ in acts:
        if act == "append":
            nodes = np.arange(node, node + given_)
            ready.append(nodes, rank)
            expected += [(number, rank) for number in nodes.tolist()]
            node, rank = node + given_, rank + 1
        elif act == "append each":
            ready.append(np.arange(node, node + given_), np.arange(rank, rank + given_))
            expected += [(node + index, rank + index) for index in range(given_)]
            node, rank = node + given_, rank + given_
        elif act == "drop":
            count = min(given_, len(expected))
            ready.drop(count)
            del expected[:count]
        elif act == "put back":
            ranks = sorted(given_)
            nodes = list(range(node, node + len(ranks)))
            ready.put_back(np.array(nodes, dtype=np.int64), np.array(ranks, dtype=np.int64))
            expected = sorted([*zip(nodes, ranks, strict=True), *expected], key=lambda each: each[1])
            node += len(ranks)
        elif act == "remove":
            ready.remove(np.array(given_, dtype=np.int64))
            expected = [each for each in expected if each[1] not in given_]
        else:
            ready.make_room(given_)
            assert min(queue.head, queue.room - queue.tail) >= given_
        assert len(ready) == len(expected)
        nodes, ranks = ready.peek(len(ready))
        assert list(zip(nodes.tolist(), ranks.tolist(), strict=True)) == expected
        assert held(queue) == expected
        assert 0 <= queue.head <= queue.tail <= queue.room


def test_peeking_takes_nothing_and_gives_no_more_than_there_is():
    ready = Queue(SimpleNamespace())
    ready.append(np.array([7, 8, 9]), 1)
    assert [ready.peek(limit)[0].tolist() for limit in (0, 2, 3, 4)] == [[], [7, 8], [7, 8, 9], [7, 8, 9]]
    assert [ready.peek(limit)[1].tolist() for limit in (0, 2)] == [[], [1, 1]]
    assert len(ready) == 3


def test_both_ends_grow_without_moving_what_waits():
    """64 nodes taken and as many put back stay in the same memory, however many wait behind them."""
    queue = SimpleNamespace()
    ready = Queue(queue)
    ready.append(np.arange(1000), np.arange(1000))
    address = queue.nodes
    for _ in range(100):
        nodes, ranks = (each.copy() for each in ready.peek(64))
        ready.drop(64)
        ready.put_back(nodes, ranks)
    assert queue.nodes == address
    assert ready.peek(1000)[0].tolist() == list(range(1000))


@pytest.mark.parametrize(("existing", "added"), [(0, 5), (1, 1), (3, 2)])
def test_put_back_goes_before_all_of_higher_rank(existing: int, added: int):
    ready = Queue(SimpleNamespace(), 2)
    ready.append(np.arange(existing), 5)
    ready.put_back(10 + np.arange(added), np.full(added, 5))
    assert ready.peek(99)[0].tolist() == [*range(10, 10 + added), *range(existing)], "before those of its own rank too"


def test_tables_grow_and_keep_what_they_hold():
    tables = Tables(2, 1, SimpleNamespace())
    tables.node_fixed[0], tables.node_waiting[0] = range(tables.node_fixed.shape[1]), 7
    tables.subs[0], tables.request_unfinished[0], tables.request_leaving[0] = range(12), 5, 6
    before = len(tables.node_waiting), len(tables.subs), len(tables.request_unfinished)
    tables.reserve(*(count + 1 for count in before))
    after = len(tables.node_waiting), len(tables.subs), len(tables.request_unfinished)
    assert all(new >= 2 * old for new, old in zip(after, before, strict=True)), "rows double: growing is cheap"
    assert tables.node_fixed[0].tolist() == list(range(tables.node_fixed.shape[1]))
    assert len(tables.node_fixed) == len(tables.node_waiting)
    assert tables.node_waiting[0] == 7
    names = ["request", "pinned", "unsubmitted", "unfinished", "waiting", "next", "start", "end", "rank", "stop"]
    columns = [getattr(tables, f"sub_{name}") for name in [*names, "cell", "ready"]]
    for number, column in enumerate(columns):
        assert column[0] == number == tables.subs[0, number]
        column[1] = -number
        assert tables.subs[1, number] == -number, "columns are views of one table"
    assert (tables.request_unfinished[0], tables.request_leaving[0]) == (5, 6)
    assert not tables.node_waiting[1:].any()


def test_compiled_code_sees_the_tables_own_memory():
    tables = Tables(2, 1, SimpleNamespace())
    for counts in ((1, 1, 1), (1000, 1, 1), (1, 1000, 1), (1, 1, 1000), (2000, 2000, 2000)):
        tables.reserve(*counts)
        shared = tables.shared
        assert (shared.nodes, shared.waiting) == (tables.node_fixed.ctypes.data, tables.node_waiting.ctypes.data)
        assert (shared.subs, shared.requests) == (tables.subs.ctypes.data, tables.request_unfinished.ctypes.data)
        assert tables.request_leaving.ctypes.data == shared.requests + 8
        assert len(tables.node_waiting) >= counts[0]
        assert len(tables.subs) >= counts[1]
        assert len(tables.request_leaving) >= counts[2]
    assert (shared.width, shared.num_inputs, shared.num_released) == (tables.node_fixed.shape[1], 2, 1)
    assert shared.width == 3 + 2 + 1  # subgraph, successor and slot; the rows read and written
