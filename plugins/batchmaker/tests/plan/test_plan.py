"""Cell graphs and their subgraphs."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port
from mlsys_batchmaker.plan.plan import READY, UNFINISHED, WAITING
from mlsys_batchmaker.plan.spec import Stop
from mlsys_core.errors import InvalidInputError

H = Port("h", "float32", (2,))
WORD = Port("word", "int64", high=10)
LAYOUT = Layout(
    [
        CellSpec("leaf", (WORD,), (H,)),
        CellSpec("inner", (Port("left", *H.signature), Port("right", *H.signature)), (H,)),
        CellSpec("encoder", (WORD, H), (H,)),
        CellSpec("decoder", (WORD, H), (H, WORD), results=(1,)),
    ]
)


def complete_tree(leaves: int) -> CellGraph:
    graph = CellGraph(LAYOUT)
    level = [graph.add("leaf", {"word": number % 10}) for number in range(leaves)]
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        left, right = zip(*pairs, strict=True)
        first = graph.add_many("inner", len(pairs), wires={"left": (left, "h"), "right": (right, "h")})
        level = list(range(first, first + len(pairs)))
    graph.result(level[0])
    return graph


def test_a_tree_of_16_leaves_has_17_subgraphs():
    plan = Planner(LAYOUT).plan(complete_tree(16))
    sizes = plan.subs[:, UNFINISHED]
    assert sorted(sizes.tolist()) == [1] * 16 + [15]  # the paper's text says 31 inner nodes; there are 15
    assert plan.subs[:, WAITING].tolist() == [0] * 16 + [16]
    assert plan.subs[:, READY].tolist() == [1] * 16 + [8]
    assert plan.num_rows[1] == 16 + 8  # inner nodes of inner nodes write over a child's row


def test_seq2seq_has_two_chains():
    graph = CellGraph(LAYOUT)
    encoder = graph.chain("encoder", 4, each={"word": [1, 2, 3, 4]}, carry={"h": "h"})
    graph.result(graph.chain("decoder", 6, carry={"h": "h", "word": "word"}, first={"word": 1, "h": encoder.last("h")}))
    plan = Planner(LAYOUT).plan(graph)
    assert plan.subs[:, UNFINISHED].tolist() == [4, 6]
    assert [kind.carry for kind in plan.kinds] == [(-1, 0), (1, 0)]
    assert [kind.is_awaited for kind in plan.kinds] == [True, False]
    assert plan.subs[:, WAITING].tolist() == [0, 1]
    assert plan.num_rows == (4 + 1 + 1, 2)  # words, the first word, the word a step gives; a state each


def test_a_type_that_comes_again_gives_another_subgraph():
    """encoder -> leafless inner -> encoder: the two encoders are connected only through what lies between."""
    graph = CellGraph(LAYOUT)
    first = graph.chain("encoder", 2, each={"word": [1, 2]}, carry={"h": "h"})
    middle = graph.add("inner", {"left": first.last("h"), "right": first.last("h")})
    again = graph.add_many("encoder", 1, wires={"h": ([middle], "h")}, each={"word": [3]})
    join = graph.add_many("inner", 1, wires={"left": ([again], "h"), "right": ([first.start], "h")})
    graph.result(join)
    plan = Planner(LAYOUT).plan(graph)
    assert plan.num_subgraphs == 4
    assert plan.kinds[0].carry is None  # its first node has another reader, so it is no chain that overwrites itself


def test_equal_structures_are_planned_once():
    planner = Planner(LAYOUT)
    assert planner.plan(complete_tree(4)) is planner.plan(complete_tree(4))
    assert planner.plan(complete_tree(4)) is not planner.plan(complete_tree(8))


def wires(left, right, count=1):
    graph = CellGraph(LAYOUT)
    graph.add("leaf", {"word": 1})
    graph.result(graph.add_many("inner", count, wires={"left": (left, "h"), "right": (right, "h")}))
    return graph


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: wires([2, 1], [0, 0], 2), "cycle"),
        (lambda: wires([1], [0]), "cycle"),
        (lambda: wires([9], [0]), "there are 2 nodes"),
        (lambda: CellGraph(LAYOUT), "empty"),
    ],
    ids=["two", "itself", "unknown node", "empty"],
)
def test_bad_graphs(build, says: str):
    with pytest.raises(InvalidInputError, match=says):
        Planner(LAYOUT).plan(build())


def test_disconnected_graphs():
    graph = CellGraph(LAYOUT)
    graph.result(graph.add("leaf", {"word": 1}))
    graph.result(graph.add("leaf", {"word": 2}))
    with pytest.raises(InvalidInputError, match="disconnected"):
        Planner(LAYOUT).plan(graph)
    graph = CellGraph(LAYOUT)
    a, b = graph.add("leaf", {"word": 1}), graph.add("leaf", {"word": 2})
    graph.add_many("inner", 1, wires={"left": ([a], "h"), "right": ([b], "h")})
    graph.result(a)
    with pytest.raises(InvalidInputError, match="no result"):
        Planner(LAYOUT).plan(graph)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda graph: graph.add("lef", {}), "there is no cell 'lef'"),
        (lambda graph: graph.add("leaf", {"wrd": 1}), "no input 'wrd'"),
        (lambda graph: graph.add("leaf", {"word": 10}), r"\[0, 10\)"),
        (lambda graph: graph.add("leaf", {"word": -1}), r"\[0, 10\)"),
        (lambda graph: graph.add("leaf", {"word": 1.5}), "int64 is needed"),
        (lambda graph: graph.add("inner", {"left": [1.0, np.nan]}), "finite"),
        (lambda graph: graph.add("inner", {"left": [1.0]}), "rows of shape"),
        (lambda graph: graph.add_many("leaf", 0), "at least one node"),
        (lambda graph: graph.add_many("leaf", 6, each={"word": [1] * 6}), "at most 5 are served"),
        (lambda graph: graph.result(3), "there are 0 nodes"),
    ],
    ids=["cell", "input", "high", "low", "dtype", "nan", "shape", "none", "many", "result"],
)
def test_bad_nodes(act, says: str):
    with pytest.raises(InvalidInputError, match=says):
        act(CellGraph(LAYOUT, max_nodes=5))


def test_a_wire_must_fit():
    graph = CellGraph(LAYOUT)
    encoder = graph.chain("encoder", 2, each={"word": [1, 2]}, carry={"word": "h"})
    graph.result(encoder)
    with pytest.raises(InvalidInputError, match=r"encoder.word takes rows"):
        Planner(LAYOUT).plan(graph)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CellSpec("a", (H,), (H,), batch_sizes=(2, 1)), "must rise"),
        (lambda: CellSpec("a", (H,), (H,), results=(1,)), "are asked for"),
        (lambda: CellSpec("a", (H, H), (H,)), "names of their own"),
        (lambda: CellSpec("a", (H,), (H,), stop=Stop(0, 1)), "one whole number"),
        (lambda: Port("x", "float99"), "dtype"),
        (lambda: Port("x y", "float32"), "port name"),
        (lambda: Port("x", "float32", high=3), "whole numbers"),
    ],
    ids=["sizes", "results", "names", "stop", "dtype", "name", "high"],
)
def test_bad_specs(make, says: str):
    with pytest.raises(InvalidInputError, match=says):
        make()
