"""Checks that hold for every graph of a subsystem."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
from mlsys_core.graphs import FORMATS, Graph, check_attributes, write_graph


def check_graph(graph: Graph, folder: Path) -> None:
    """Check that a graph is a typed DAG, that it is written in every format, and read back as it was from GraphML."""
    assert isinstance(graph, nx.DiGraph)
    assert nx.is_directed_acyclic_graph(graph)
    check_attributes(graph)
    for suffix in FORMATS:
        write_graph(graph, folder / f"graph{suffix}")
    read = nx.read_graphml(folder / "graph.graphml")
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    assert {(a, b): data for a, b, data in read.edges(data=True)} == {(a, b): d for a, b, d in graph.edges(data=True)}
    assert graph.graph.items() <= read.graph.items()
