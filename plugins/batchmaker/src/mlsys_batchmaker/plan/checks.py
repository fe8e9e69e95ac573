"""Reasons for which a structure has no plan: a wire that does not fit, a cycle, nodes that lead to no result."""

from __future__ import annotations

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.structure import expand, sizes_of

Ints = NDArray[np.int64]


def check_structure(layout: Layout, structure: bytes) -> None:
    """Check that a structure can be planned; ``plan.cpp`` finds the same faults, without words for them.

    Args:
        layout: layout of the model.
        structure: see :mod:`mlsys_batchmaker.plan.structure`.

    Raises:
        InvalidInputError: there is a cycle, nodes are not connected, or a wire does not fit.
    """
    _, _, must_connect = sizes_of(structure)
    cells, codes, results = expand(layout, structure)
    is_wire = codes > 0
    sources = np.where(is_wire, (codes - 1) // layout.num_outputs, -1)  # [n, inputs] node
    _check_wires(layout, cells, is_wire, sources, (codes - 1) % layout.num_outputs)
    _check_graph(sources, set(results.tolist()), must_connect=must_connect)


def _check_wires(layout: Layout, cells: Ints, is_wire: NDArray[np.bool_], sources: Ints, outputs: Ints) -> None:
    """Check that every wire leads from an output that exists to an input of its signature."""
    nodes, inputs = np.nonzero(is_wire)
    src, out = sources[nodes, inputs], outputs[nodes, inputs]
    if src.size and src.max() >= len(cells):
        raise InvalidInputError(f"a cell is wired to node {src.max()}: there are {len(cells)} nodes")
    fits = layout.output_banks[cells[src], out] == layout.input_banks[cells[nodes], inputs]
    if not fits.all():
        at = int(np.argmin(fits))
        node, source = layout.cells[cells[nodes[at]]], layout.cells[cells[src[at]]]
        port = node.inputs[int(inputs[at])]
        given = source.outputs[int(out[at])] if out[at] < len(source.outputs) else None
        got = "an output it does not have" if given is None else f"{given.name!r} with rows {given.signature}"
        raise InvalidInputError(f"{node.name}.{port.name} takes rows {port.signature}, but {source.name} gives {got}")


def _check_graph(sources: Ints, results: set[int], *, must_connect: bool) -> None:
    """Check that no node feeds itself, all hang together, and each leads to a result."""
    import networkx as nx

    nodes, inputs = np.nonzero(sources >= 0)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(sources)))
    graph.add_edges_from(zip(sources[nodes, inputs].tolist(), nodes.tolist(), strict=True))
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [node for node, _ in nx.find_cycle(graph)]
        raise InvalidInputError(f"the cell graph has a cycle among the nodes {cycle[:8]}: no cell may feed itself")
    if must_connect and len(results) > 1 and not nx.is_weakly_connected(graph):  # one result: the next check says more
        raise InvalidInputError("the cell graph is disconnected: all cells of a request must hang together")
    lost = sorted(set(graph) - results.union(*(nx.ancestors(graph, node) for node in results)))
    if lost:
        raise InvalidInputError(f"the cell graph has nodes that lead to no result: {lost[:8]}")
