"""The operator graph: its order, and what it refuses."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import build_graph, read_graph


@settings(max_examples=60)
@given(st.data())
def test_order_is_topological_and_edges_are_kept(data: st.DataObject):
    names = [f"op{i}" for i in range(data.draw(st.integers(1, 10)))]
    order = data.draw(st.permutations(names))
    possible = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    edges = data.draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    graph = build_graph(names, edges)
    assert sorted(graph.names) == sorted(names)
    assert {(graph.names[p], graph.names[c]) for p, c in graph.edges} == set(edges)
    assert all(p < c for p, c in graph.edges)


@pytest.mark.parametrize(
    ("nodes", "edges", "says"),
    [
        ([], [], "has no nodes"),
        (["a", "b", "a"], [], "node 'a' is listed twice"),
        (["a"], [("a", "x")], "'x' is not among the nodes"),
        (["a", "b"], [("a", "b"), ("a", "b")], "'a' -> 'b' is listed twice"),
        (["a"], [("a", "a")], "cycle: 'a' -> 'a'"),
        (["s", "a", "b", "c", "t"], [("s", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "t")], "cycle: "),
    ],
)
def test_a_graph_that_is_no_dag_is_refused(nodes: list[str], edges: list[tuple[str, str]], says: str):
    with pytest.raises(InvalidInputError, match=re.escape(says)):
        build_graph(nodes, edges)


def test_the_cycle_shown_is_one():
    edges = [("s", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "t"), ("x", "y"), ("b", "t")]
    with pytest.raises(InvalidInputError) as refusal:
        build_graph(["t", "s", "a", "b", "c", "x", "y"], edges)
    cycle = re.findall(r"'(\w)'", str(refusal.value))
    assert cycle[0] == cycle[-1]
    assert all(pair in edges for pair in pairwise(cycle))
    assert len(cycle) == 4


def test_unreadable_files_are_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match=r"cannot read the graph .*none\.json: No such file or directory$"):
        read_graph(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        read_graph(tmp_path / "binary.json")


def test_a_graph_file_is_read(tmp_path: Path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"nodes": ["out", "in"], "edges": [["in", "out"]]}))
    graph = read_graph(file)
    assert (graph.names, graph.edges) == (("in", "out"), ((0, 1),))


def test_the_first_named_of_several_ready_operators_comes_first():
    graph = build_graph(["join", "d", "c", "b", "a"], [("a", "join"), ("b", "join"), ("d", "b"), ("a", "c")])
    assert graph.names == ("d", "b", "a", "join", "c")
    assert graph.edges == ((0, 1), (1, 3), (2, 3), (2, 4))
    assert graph.successors() == [[1], [3], [3, 4], [], []]
    assert build_graph(["b", "a"], []).names == ("b", "a")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"nodes": [""], "edges": []}', "list of non-empty strings; write"),
        ('{"nodes": ["a", "b"], "edges": [["a"]]}', "edge ['a'] is not a pair of node names; write"),
        ('{"nodes": ["a", "b"], "edges": [["a", 1]]}', "edge ['a', 1] is not a pair"),
        ('{"nodes": ["a"], "edges": [], "more": 1}', "holds the keys ['edges', 'more', 'nodes']; write"),
        ('{"nodes": ["a"], "edges": "ab"}', "'edges' must be a list of pairs; write"),
        ('{"nodes": ["a"], "edges": [["x", "a"]]}', "edge 'x' -> 'a': 'x' is not among the nodes"),
        ('"ab"', "holds a str; write"),
        ("[]", "holds a list"),
        ('{"nodes": [1], "edges": []}', "list of non-empty strings"),
        ('{"nodes": {"a": 1}, "edges": []}', "list of non-empty strings"),
        ('{"nodes": ["a", "b"], "edges": ["ab"]}', "is not a pair"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_nearly_a_graph_is_told_how_to_be_one(tmp_path: Path, text: str, says: str):
    file = tmp_path / "graph.json"
    file.write_text(text)
    with pytest.raises(InvalidInputError) as refusal:
        read_graph(file)
    assert says in str(refusal.value)
    example = re.search(r"write (.*)$", str(refusal.value))
    if example:  # and what it says to write can be read
        file.write_text(example[1])
        assert read_graph(file).names == ("a", "b")


def test_names_are_read_as_utf_8(tmp_path: Path):
    file = tmp_path / "graph.json"
    file.write_bytes('{"nodes": ["größe", "ß"], "edges": [["größe", "ß"]]}'.encode())
    assert read_graph(file).names == ("größe", "ß")
