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
    preds = predecessors(sources.tolist())
    topological(preds)
    _check_connected(preds, set(results.tolist()), must_connect=must_connect)


def predecessors(sources: list[list[int]]) -> list[list[int]]:
    """Return for each node the nodes that feed it, rising; ``sources`` [n, inputs] are nodes, or -1."""
    return [sorted({source for source in row if source >= 0}) for row in sources]


def topological(preds: list[list[int]]) -> list[int]:
    """Return the nodes in an order in which each comes after those that feed it.

    Raises:
        InvalidInputError: there is a cycle.
    """
    if all(not before or before[-1] < node for node, before in enumerate(preds)):
        return list(range(len(preds)))
    missing = [len(before) for before in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for node, before in enumerate(preds):
        for pred in before:
            succs[pred].append(node)
    order = [node for node, count in enumerate(missing) if count == 0]
    for node in order:
        for succ in succs[node]:
            missing[succ] -= 1
            if missing[succ] == 0:
                order.append(succ)  # the loop goes on with it
    if len(order) < len(preds):
        stuck = [node for node, count in enumerate(missing) if count > 0]
        raise InvalidInputError(f"the cell graph has a cycle among the nodes {stuck[:8]}: no cell may feed itself")
    return order


def find(root: list[int], node: int) -> int:
    """Return the root of ``node`` in a forest of parents, and shorten the path to it."""
    while root[node] != node:
        root[node] = root[root[node]]
        node = root[node]
    return node


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


def _check_connected(preds: list[list[int]], results: set[int], *, must_connect: bool) -> None:
    """Check that all nodes hang together, and each leads to a result."""
    if must_connect and len(results) > 1:  # with a single result, all that lead to it hang together
        root = list(range(len(preds)))
        for node, before in enumerate(preds):
            for pred in before:
                root[find(root, pred)] = find(root, node)
        if len({find(root, node) for node in range(len(preds))}) > 1:
            raise InvalidInputError("the cell graph is disconnected: all cells of a request must hang together")
    reached = set(results)
    todo = list(results)
    for node in todo:
        for pred in preds[node]:
            if pred not in reached:
                reached.add(pred)
                todo.append(pred)
    if len(reached) < len(preds):
        lost = sorted(set(range(len(preds))) - reached)
        raise InvalidInputError(f"the cell graph has nodes that lead to no result: {lost[:8]}")
