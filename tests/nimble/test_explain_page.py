"""Critical paths and drawings of graphs: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.explain.page import Link, critical_path, places
from mlsys_nimble.ir.graph import build_graph
from mlsys_nimble.planning.streams import assign_streams


@dataclass
class Done:
    operator: str
    worker: int
    begin_ns: int
    end_ns: int


def test_the_path_goes_through_what_was_waited_for():
    tasks = [
        Done("a", 0, 0, 10),
        Done("b", 1, 0, 4),
        Done("c", 1, 10, 30),  # reads a: waits for it, though b ended on its own worker
        Done("d", 0, 12, 20),
        Done("e", 0, 31, 40),  # reads d, and c, which ended later
    ]
    needs = {"c": ["a"], "d": ["a"], "e": ["d", "c"]}
    assert critical_path(tasks, needs) == [Link(0, 0), Link(2, 0), Link(4, 1)]
    assert critical_path([], {}) == []


def test_parts_of_an_operator_that_one_worker_ran_stand_behind_each_other():
    tasks = [Done("a", 0, 0, 5), Done("a", 1, 6, 9), Done("b", 0, 10, 12)]
    assert critical_path(tasks, {"b": ["a"]}) == [Link(0, 0), Link(1, 1), Link(2, 1)]


@given(st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda edge: edge[0] < edge[1]), max_size=30))
def test_drawn_operators_stand_apart_and_below_what_they_read(edges: set[tuple[int, int]]):
    graph = build_graph([str(n) for n in range(12)], [(str(a), str(b)) for a, b in edges])
    assignment = assign_streams(graph)
    at = places(assignment)
    assert len(set(at)) == 12
    assert all(at[a][1] < at[b][1] for a, b in graph.edges)
    for members in assignment.streams():
        assert len({at[operator][0] for operator in members}) == 1
