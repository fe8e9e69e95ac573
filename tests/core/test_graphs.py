"""Graphs: rules for attributes, files, the layered drawing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import FancyBboxPatch
from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import FORMATS, MAX_DRAWN, Graph, check_attributes, draw_graph, new_graph, to_dot, write_graph

from tests.graph_checks import check_graph

NASTY = 'a "quoted"\\ $x$ <b> \n& é{|}'


def diamond() -> Graph:
    graph = new_graph("a diamond", column="stream", color="kind", dashed="synchronises", hidden="is_redundant")
    for name, stream in [("in", 0), (NASTY, 0), ("right", 1), ("out", 0)]:
        graph.add_node(name, stream=stream, kind=f"kind {stream}", seconds=0.5, is_cut=stream == 1)
    for one, other in [("in", NASTY), ("in", "right"), (NASTY, "out"), ("right", "out"), ("in", "out")]:
        graph.add_edge(
            one, other, nbytes=4, synchronises="right" in (one, other), is_redundant=(one, other) == ("in", "out")
        )
    return graph


def test_every_format_is_written_and_graphml_read_back(tmp_path: Path):
    check_graph(diamond(), tmp_path)
    check_graph(new_graph("nothing"), tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot's own
def test_dot_is_read_by_another_reader():
    pydot = pytest.importorskip("pydot")
    graph = diamond()
    (read,) = pydot.graph_from_dot_data(to_dot(graph))
    assert len([node for node in read.get_nodes() if node.get_name() != "node"]) == len(graph)
    edges = read.get_edges()
    assert len(edges) == graph.number_of_edges()
    assert sorted(edge.get("style") for edge in edges) == ["dashed", "dashed", "invis", "solid", "solid"]
    (left,) = read.get_node('"right"')
    assert left.get("label") == '"right"'
    assert "seconds: 0.5" in left.get("tooltip")


def test_a_picture_has_a_box_a_node_and_hides_what_is_redundant(tmp_path: Path):
    figure = draw_graph(diamond())
    patches = figure.axes[0].patches
    assert sum(isinstance(patch, FancyBboxPatch) for patch in patches) == 4
    arrows = [patch for patch in patches if not isinstance(patch, FancyBboxPatch)]
    assert len(arrows) == 4
    assert sum(arrow.get_linestyle() != "solid" and arrow.get_linestyle() != "-" for arrow in arrows) == 2
    write_graph(diamond(), tmp_path / "g.svg")
    texts = [
        "".join(text.itertext())
        for text in ET.parse(tmp_path / "g.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"in", "right", "out", "a diamond", "stream 0", "stream 1"} <= set(texts)


@settings(max_examples=40)
@given(st.data())
def test_boxes_do_not_overlap_and_edges_point_down(data: st.DataObject):
    column = data.draw(st.sampled_from([None, "lane"]))
    graph = new_graph("", column=column)
    count = data.draw(st.integers(1, 12))
    for number in range(count):
        lane = data.draw(st.integers(-1, 2))
        graph.add_node(f"{number:02}", **({"lane": lane} if lane >= 0 else {}))
        for source in range(number):
            if data.draw(st.booleans()):
                graph.add_edge(f"{source:02}", f"{number:02}")
    figure = draw_graph(graph)
    found = [patch.get_bbox() for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    texts = [text.get_text() for text in figure.axes[0].texts]
    at = dict(zip(texts[-count:], found, strict=True))
    assert set(at) == set(graph)
    for one in graph:
        for other in graph:
            assert one == other or not (
                abs(at[one].x0 - at[other].x0) < at[one].width and abs(at[one].y0 - at[other].y0) < at[one].height
            )
    assert all(at[one].y0 > at[other].y1 for one, other in graph.edges)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda graph: graph.add_node(1), "node 1 of a graph: names must be strings"),
        (lambda graph: graph.add_node("n", stage=None), "stage=None is a NoneType, not str, int, float or bool"),
        (lambda graph: graph.add_node("n", stream=1.0), "stream=1.0 is a float, not int"),
        (lambda graph: graph.add_node("n", seconds=float("nan")), "seconds is nan; numbers must be finite"),
        (lambda graph: graph.add_edge("in", "n", shape=(1, 2)), "edge ('in', 'n'): shape=(1, 2) is a tuple"),
        (lambda graph: graph.graph.update(size=[]), "graph 'a diamond': size=[] is a list"),
    ],
)
def test_attributes_of_other_types_are_refused(change, says: str, tmp_path: Path):
    graph = diamond()
    change(graph)
    with pytest.raises(InvalidInputError, match=re.escape(says)):
        check_attributes(graph)
    with pytest.raises(InvalidInputError, match=re.escape(says)):
        write_graph(graph, tmp_path / "g.dot")


def test_files_that_cannot_be_written_are_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match=r"cannot be written as 'g.gif': end the name in \.graphml, \.dot"):
        write_graph(diamond(), tmp_path / "g.gif")
    with pytest.raises(InvalidInputError, match="there is no folder"):
        write_graph(diamond(), tmp_path / "none" / "g.dot")
    for suffix in FORMATS:
        (tmp_path / f"folder{suffix}").mkdir()
        with pytest.raises(InvalidInputError, match=r"written|cannot write"):
            write_graph(diamond(), tmp_path / f"folder{suffix}")


def test_a_graph_that_cannot_be_drawn_is_refused_and_still_written(tmp_path: Path):
    cycle = new_graph("cycle")
    cycle.add_edges_from([("a", "b"), ("b", "a")])
    large = new_graph("large")
    large.add_nodes_from(f"n{number}" for number in range(MAX_DRAWN + 1))
    wide = new_graph("wide")
    wide.add_nodes_from(f"n{number:028}" for number in range(200))
    for graph, name, says in [
        (cycle, "g.svg", "without a cycle"),
        (large, "g.svg", "cannot draw 1001 nodes, at most 1000"),
        (wide, "g.png", "too large for a .png"),
    ]:
        with pytest.raises(InvalidInputError, match=says):
            write_graph(graph, tmp_path / name)
        write_graph(graph, tmp_path / "g.dot")
        write_graph(graph, tmp_path / "g.graphml")
        assert set(nx.read_graphml(tmp_path / "g.graphml").edges) == set(graph.edges)


def test_characters_that_xml_lacks_are_replaced(tmp_path: Path):
    graph = new_graph("odd")
    graph.add_node("a", text="bell\x07 and \ud800")
    for suffix in FORMATS:
        write_graph(graph, tmp_path / f"g{suffix}")
    assert nx.read_graphml(tmp_path / "g.graphml").nodes["a"]["text"] == "bell\ufffd and \ufffd"


def test_ten_thousand_nodes_are_written(tmp_path: Path):
    graph = new_graph("large")
    for number in range(10_000):
        graph.add_node(f"n{number}", seconds=0.1)
        for source in range(max(0, number - 3), number):
            graph.add_edge(f"n{source}", f"n{number}", nbytes=4)
    write_graph(graph, tmp_path / "g.dot")
    write_graph(graph, tmp_path / "g.graphml")
    assert nx.read_graphml(tmp_path / "g.graphml").number_of_edges() == graph.number_of_edges()
