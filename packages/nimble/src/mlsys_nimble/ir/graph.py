"""The operator graph: what capture produces and every later stage (streams, memory plan, schedule) reads.

Plain data, no torch. Operators stand in a topological order, so an edge always points from a smaller index to a larger.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import Graph, new_graph

Edge = tuple[int, int]  # (producer, consumer), by index


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Directed acyclic graph of operators; built and checked by :func:`build_graph`."""

    names: tuple[str, ...]  # unique, in a topological order; an operator's index is its position here
    edges: tuple[Edge, ...]  # unique, producer < consumer, sorted

    def successors(self) -> list[list[int]]:
        """Return the consumers of each operator, in ascending order."""
        consumers: list[list[int]] = [[] for _ in self.names]
        for producer, consumer in self.edges:
            consumers[producer].append(consumer)
        return consumers

    def to_networkx(self) -> Graph:
        """Return the operators by name, with their dependencies."""
        graph = new_graph("operators")
        graph.add_nodes_from(self.names)
        graph.add_edges_from((self.names[producer], self.names[consumer]) for producer, consumer in self.edges)
        return graph


def build_graph(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> OperatorGraph:
    """Build the operator graph of named nodes; of several ready operators the one named first comes first.

    Raises:
        InvalidInputError: no nodes, a name twice, an edge to an unknown node, an edge twice, or a cycle (it is shown).

    Example:
        >>> build_graph(["join", "a", "b"], [("a", "join"), ("b", "join")]).names
        ('a', 'b', 'join')
    """
    import networkx as nx

    index_of = {name: index for index, name in enumerate(nodes)}
    if not nodes:
        raise InvalidInputError("the graph has no nodes; give at least one")
    if len(index_of) < len(nodes):
        repeated = next(name for index, name in enumerate(nodes) if index_of[name] != index)
        raise InvalidInputError(f"node {repeated!r} is listed twice; names must be unique")
    pairs: set[Edge] = set()
    for producer, consumer in edges:
        for name in (producer, consumer):
            if name not in index_of:
                raise InvalidInputError(f"edge {producer!r} -> {consumer!r}: {name!r} is not among the nodes")
        pair = (index_of[producer], index_of[consumer])
        if pair in pairs:
            raise InvalidInputError(f"edge {producer!r} -> {consumer!r} is listed twice; list each dependency once")
        pairs.add(pair)
    digraph: nx.DiGraph[int] = nx.DiGraph()
    digraph.add_nodes_from(range(len(nodes)))
    digraph.add_edges_from(sorted(pairs))
    try:
        order = list(nx.lexicographical_topological_sort(digraph))
    except nx.NetworkXUnfeasible:
        cycle = [producer for producer, _ in nx.find_cycle(digraph)]
        shown = " -> ".join(repr(nodes[index]) for index in (*cycle, cycle[0]))
        raise InvalidInputError(f"the graph has a cycle: {shown}; operators can only depend on earlier ones") from None
    rank = {index: position for position, index in enumerate(order)}
    return OperatorGraph(
        names=tuple(nodes[index] for index in order),
        edges=tuple(sorted((rank[producer], rank[consumer]) for producer, consumer in pairs)),
    )


def read_graph(path: Path) -> OperatorGraph:
    """Read the operator graph from a JSON file ``{"nodes": ["a", "b"], "edges": [["a", "b"]]}``.

    Raises:
        InvalidInputError: the file cannot be read, is not such JSON, or :func:`build_graph` refuses the graph.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read the graph {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond reason
        raise InvalidInputError(f"{path} is not JSON: {error}") from error
    wanted = '{"nodes": ["a", "b"], "edges": [["a", "b"]]}'
    if not isinstance(data, dict) or set(data) != {"nodes", "edges"}:
        got = f"the keys {sorted(data)}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise InvalidInputError(f"{path} holds {got}; write {wanted}")
    nodes, edges = data["nodes"], data["edges"]
    if not isinstance(nodes, list) or not all(isinstance(name, str) and name for name in nodes):
        raise InvalidInputError(f"{path}: 'nodes' must be a list of non-empty strings; write {wanted}")
    if not isinstance(edges, list):
        raise InvalidInputError(f"{path}: 'edges' must be a list of pairs; write {wanted}")
    for edge in edges:
        if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(name, str) for name in edge):
            raise InvalidInputError(f"{path}: edge {edge!r} is not a pair of node names; write {wanted}")
    return build_graph(nodes, [(producer, consumer) for producer, consumer in edges])
