"""Cell graphs as networkx: what they say, and that the planner's subgraphs follow from it."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from mlsys_batchmaker.models.sequence import seq2seq_model
from mlsys_batchmaker.models.tree import random_tree, tree_model
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port
from mlsys_batchmaker.plan.plan import SUB
from mlsys_core.errors import InvalidInputError

from tests.graph_checks import check_graph

H, C = Port("h", "float32", (2,)), Port("c", "float64", (3,))
WORD = Port("word", "int64", high=10)
LAYOUT = Layout(
    [
        CellSpec("lstm", (WORD, H, C), (H, C), priority=3),
        CellSpec("join", (Port("left", *H.signature), Port("right", *H.signature)), (H,)),
    ]
)


def two_chains() -> CellGraph:
    """Two chains of two cells, joined twice; the join's state starts a third chain."""
    graph = CellGraph(LAYOUT)
    carry = {"h": "h", "c": "c"}
    left = graph.chain("lstm", 2, each={"word": [1, 2]}, carry=carry)
    right = graph.chain("lstm", 2, each={"word": [3, 4]}, carry=carry)
    wires = {"left": ([1, 1], "h"), "right": ([3, 3], "h")}
    joins = graph.add_many("join", 2, wires=wires)
    assert (left.start, right.start, joins) == (0, 2, 4)
    last = graph.chain("lstm", 1, each={"word": [5]}, carry=carry, first={"h": right.last("h")})
    graph.result(joins)
    graph.result(joins + 1)
    graph.result(last)
    return graph


def test_nodes_are_cells_and_edges_their_rows(tmp_path: Path):
    graph = two_chains().to_networkx()
    check_graph(graph, tmp_path)
    assert graph.nodes["0"] == {
        "label": "lstm 0",
        "cell": "lstm",
        "priority": 3,
        "constants": "word",
        "is_result": False,
        "phase": 0,
    }
    assert graph.nodes["4"]["constants"] == ""
    assert nx.get_node_attributes(graph, "phase") == {**dict.fromkeys("01236", 0), "4": 1, "5": 1}
    assert [name for name, is_one in graph.nodes(data="is_result") if is_one] == ["4", "5", "6"]
    assert graph.edges["0", "1"] == {"wires": "h -> h, c -> c", "nbytes": 2 * 4 + 3 * 8}
    assert graph.edges["1", "4"] == {"wires": "h -> left", "nbytes": 8}
    assert set(graph.edges) == {("0", "1"), ("2", "3"), ("1", "4"), ("3", "4"), ("1", "5"), ("3", "5"), ("3", "6")}


def grouped(graph: CellGraph) -> set[frozenset[str]]:
    """Return subgraphs by the definition: connected cells of one type and phase."""
    cells = graph.to_networkx()
    same = [
        (one, other)
        for one, other in cells.edges
        if all(cells.nodes[one][name] == cells.nodes[other][name] for name in ("cell", "phase"))
    ]
    return {frozenset(part) for part in nx.weakly_connected_components(cells.edge_subgraph(same))} | {
        frozenset([name]) for name in set(cells) - {name for edge in same for name in edge}
    }


def planned(graph: CellGraph) -> set[frozenset[str]]:
    plan = Planner(graph.layout).plan(graph)
    subgraphs: dict[int, set[str]] = {}
    for subgraph, origin in zip(plan.nodes[:, SUB].tolist(), plan.origin.tolist(), strict=True):
        subgraphs.setdefault(subgraph, set()).add(str(origin))
    return {frozenset(part) for part in subgraphs.values()}


def test_the_planners_subgraphs_are_connected_cells_of_one_type_and_phase():
    assert grouped(two_chains()) == planned(two_chains())
    model = tree_model(num_words=30, hidden_size=4)
    for seed in range(8):
        graph = CellGraph(model.layout)
        model.architecture.unfold(random_tree(np.random.default_rng(seed), num_leaves=9, num_words=30), graph)
        assert grouped(graph) == planned(graph)


def test_a_model_gives_the_graph_of_a_request(tmp_path: Path):
    model = seq2seq_model(hidden_size=4)
    example = model.to_networkx()
    check_graph(example, tmp_path)
    assert {cell for _, cell in example.nodes(data="cell")} == {"encoder", "decoder"}
    assert {phase for _, phase in example.nodes(data="phase")} == {0, 1}
    tree = tree_model(num_words=30, hidden_size=4)
    graph = tree.to_networkx(random_tree(np.random.default_rng(0), num_leaves=5, num_words=30))
    assert [cell for _, cell in graph.nodes(data="cell")] == ["leaf"] * 5 + ["inner"] * 4
    with pytest.raises(InvalidInputError, match="has no tensor 'words'"):
        tree.to_networkx({})
