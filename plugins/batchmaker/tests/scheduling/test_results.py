"""Results by slot: what is written comes back, in the order asked for and in memory of the reader's own."""

from __future__ import annotations

import numpy as np
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port, Wire
from mlsys_batchmaker.scheduling.results import Results

H = Port("h", "float32", (2,))
WORD = Port("word", "int64", high=100)
LAYOUT = Layout(
    [
        CellSpec("both", (H,), (H, WORD), results=(1, 0)),
        CellSpec("vector", (H,), (H,)),
        CellSpec("word", (H,), (H, WORD), results=(1,)),
        CellSpec("pair", (H,), (WORD, H)),
    ]
)


def rows(*values: int) -> np.ndarray:
    return np.array([[value, -value] for value in values], dtype=np.float32)


def test_each_result_has_the_dtype_and_shape_of_its_port():
    results = Results(LAYOUT)
    results.reserve(300)
    results.write(0, np.array([5, 299]), (np.array([1, 2]), rows(3, 4)))
    results.write(1, np.array([0]), (rows(9),))
    read = results.read_several(0, np.array([299, 5]), [1, 1])
    assert [[(int(word), h.tolist()) for word, h in each] for each in read] == [[(2, [4, -4])], [(1, [3, -3])]]
    assert read[0][0][0].dtype == np.int64
    assert read[0][0][1].dtype == np.float32
    assert results.read_several(1, np.array([0]), [1])[0][0][0].tolist() == [9, -9]


def test_several_requests_get_as_many_as_each_asked_for():
    results = Results(LAYOUT)
    results.reserve(8)
    results.write(2, np.arange(8), (np.arange(8) * 10,))
    read = results.read_several(2, np.array([1, 2, 5, 7, 0]), [2, 0, 3])
    assert [[int(word) for (word,) in each] for each in read] == [[10, 20], [], [50, 70, 0]]


def test_a_reader_gets_its_own_copy():
    results = Results(LAYOUT)
    results.reserve(4)
    results.write(1, np.arange(4), (rows(1, 2, 3, 4),))
    graph = CellGraph(LAYOUT)
    graph.result(graph.add("vector", {"h": [1, 2]}))
    plan = Planner(LAYOUT).plan(graph)
    several = results.read_several(1, np.array([1, 2]), [2])[0]
    one = results.read(plan, 3, None)
    results.write(1, np.arange(4), (rows(0, 0, 0, 0),))
    several[0][0][:] = 7
    assert several[1][0].tolist() == [3, -3]
    assert one[0][0].tolist() == [4, -4]


def test_tables_grow_and_keep_what_they_hold():
    results = Results(LAYOUT)
    results.reserve(1)
    results.write(1, np.array([0]), (rows(5),))
    for count in (2, 256, 257, 5000):
        results.reserve(count)
        results.write(1, np.array([count - 1]), (rows(count),))
        assert results.read_several(1, np.array([0, count - 1]), [2])[0][0][0].tolist() == [5, -5]
        assert results.read_several(1, np.array([count - 1]), [1])[0][0][0].tolist() == [count, -count]
    results.reserve(3)  # it never shrinks
    assert results.read_several(1, np.array([4999]), [1])[0][0][0].tolist() == [5000, -5000]


def chain_of(cells: list[str]) -> CellGraph:
    """Each cell reads the one before it, and is asked for."""
    graph = CellGraph(LAYOUT)
    node = graph.add(cells[0], {"h": [1, 2]})
    graph.result(node)
    for cell in cells[1:]:
        node = graph.add(cell, {"h": Wire(node, "h")})
        graph.result(node)
    return graph


def test_a_request_gets_its_results_in_the_order_it_asked_for():
    """Read results of one cell and of several: all and only those that are there."""
    for cells in (["word"] * 3, ["word", "vector", "word", "pair"]):
        graph = chain_of(cells)
        plan = Planner(LAYOUT).plan(graph)
        results = Results(LAYOUT)
        first = 10
        results.reserve(first + plan.num_slots)
        slots, numbers = plan.asked[1], plan.asked[3]
        for index, (slot, cell) in enumerate(zip(slots.tolist(), numbers.tolist(), strict=True)):
            by_port = {"word": np.array([index]), "h": rows(index)}
            spec = LAYOUT.cells[cell]
            columns = tuple(by_port[spec.outputs[output].name] for output in spec.results)
            results.write(cell, np.array([first + slot]), columns)
        names = [LAYOUT.cells[cell].name for cell in numbers.tolist()]
        assert names == cells, "plans keep the order of what is asked for"

        def number_of(values: tuple) -> int:
            return max(int(np.max(value)) for value in values)

        assert [number_of(values) for values in results.read(plan, first, None)] == list(range(len(cells)))
        assert [len(values) for values in results.read(plan, first, None)] == [
            len(LAYOUT.cells[cell].results) for cell in numbers.tolist()
        ]
        there = np.array([True, *[False] * (len(cells) - 2), True])
        assert [number_of(values) for values in results.read(plan, first, there)] == [0, len(cells) - 1]
        assert results.read(plan, first, np.zeros(len(cells), bool)) == []


def test_the_one_result_of_a_chain_that_stopped_before_it_is_none():
    graph = chain_of(["word"])
    plan = Planner(LAYOUT).plan(graph)
    results = Results(LAYOUT)
    results.reserve(1)
    results.write(2, np.array([0]), (np.array([4]),))
    assert [int(word) for (word,) in results.read(plan, 0, None)] == [4]
    assert [int(word) for (word,) in results.read(plan, 0, np.array([True]))] == [4]
    assert results.read(plan, 0, np.array([False])) == []
