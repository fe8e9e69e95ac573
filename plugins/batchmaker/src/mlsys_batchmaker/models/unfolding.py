"""Common ways to unfold a request in one line: folds over nodes, trees of any number of children, attention.

All read what feeds what from the cells' names: an input that a cell also gives is carried from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from numpy.typing import ArrayLike
from torch import nn

from mlsys_batchmaker.cells.cell import Cell
from mlsys_batchmaker.models.model import Payload
from mlsys_batchmaker.models.own import Row, Unfold, own_cell
from mlsys_batchmaker.plan import CellGraph, Wire
from mlsys_batchmaker.plan.graph import Chain


def fold(
    graph: CellGraph, cell: str, over: Chain | Sequence[int], each: Mapping[str, ArrayLike] | None = None
) -> Chain:
    """Add a chain of ``cell`` with one step for each node of ``over``.

    Args:
        graph: Of the request.
        cell: Name of the cell. Inputs that it also gives are carried, and begin as zeros; those of ``each`` are the
            step's row; all others read the output of that name of the step's node.
        over: A chain, or nodes.
        each: By input, rows [steps, ...].

    Raises:
        InvalidInputError: There is no such cell, it carries nothing, or a node has no such output.

    Example:
        >>> from mlsys_batchmaker.plan import CellSpec, Layout, Port
        >>> h, total = Port("h", "float32", (4,)), Port("total", "float32", (4,))
        >>> graph = CellGraph(Layout([CellSpec("rnn", (h,), (h,)), CellSpec("sum", (h, total), (total,))]))
        >>> states = graph.chain("rnn", 3, carry={"h": "h"})
        >>> graph.result(fold(graph, "sum", states).last("total"))
        >>> graph.num_nodes
        6
    """
    nodes = range(over.start, over.start + over.length) if isinstance(over, Chain) else list(over)
    inputs, outputs = _names(graph, cell)
    carry = {name: name for name in inputs if name in outputs}
    if not carry:
        raise InvalidInputError(f"cell {cell!r} gives none of its own inputs, so nothing is carried: use add_many")
    wires = {name: (nodes, name) for name in inputs if name not in carry and name not in (each or {})}
    return graph.chain(cell, len(nodes), each=each, wires=wires, carry=carry)


def tree(join: str, node: str) -> Unfold:
    """Return how a tree of any number of children unfolds: each node is fed by a fold of ``join`` over its children.

    A request has ``parents``, [nodes]: the number of each node's parent, which is greater than its own, and -1 of the
    root, the last one. Its other arrays have one row for each node, and are read by inputs of their names.

    Args:
        join: Name of the cell that takes in one child: it carries sums, reads the child's outputs, and rows of the
            parent.
        node: Name of the node's cell: it reads the sums, zeros in leaves, and rows of its own.
    """

    def unfold(request: Payload, graph: CellGraph) -> int:
        given = np.asarray(request["parents"])
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidInputError(f"parents: whole numbers in a row are needed, got {given.dtype}{given.shape}")
        parents = given.astype(np.int64)
        if not len(parents) or parents[-1] != -1 or not (parents[:-1] > np.arange(len(parents) - 1)).all():
            raise InvalidInputError("parents: each node's parent comes after it, and the last node's is -1")
        rows = {name: value for name, value in request.items() if name != "parents"}
        if unlike := {name: len(value) for name, value in rows.items() if len(value) != len(parents)}:
            raise InvalidInputError(f"parents has {len(parents)} nodes, and there are other rows: {unlike}")
        (join_inputs, sums), (node_inputs, _) = _names(graph, join), _names(graph, node)
        made: list[int] = []
        for number in range(len(parents)):
            children = [made[child] for child in np.flatnonzero(parents[:number] == number)]
            own: dict[str, Wire | ArrayLike] = {name: rows[name][number] for name in node_inputs if name in rows}
            if children:
                each = {name: [rows[name][number]] * len(children) for name in join_inputs if name in rows}
                folded = fold(graph, join, children, each)
                own |= {name: folded.last(name) for name in sums if name in node_inputs}
            made.append(graph.add(node, own))
        return made[-1]

    return unfold


def softmax_mean(
    name: str, score: Callable[..., torch.Tensor], inputs: Mapping[str, Row], value: str, /, **modules: nn.Module
) -> Cell:
    """Make a cell whose :func:`fold` is a mean of rows, weighted by the softmax of their scores: attention.

    Sums are kept relative to the greatest score so far, so any number of steps is exact to rounding.

    Args:
        name: Unique in its model.
        score: ``(weights, *inputs) -> [b, 1]``.
        inputs: As of :func:`~mlsys_batchmaker.models.own.own_cell`; what ``score`` and the mean read.
        value: Which of the inputs is averaged.
        modules: With the weights, by name.

    Returns:
        A cell that gives ``mean``, like ``value``, and the sums ``top`` and ``total``, [b, 1].

    Example:
        >>> softmax_mean("attend", lambda _, h: h.sum(1, keepdim=True), {"h": 4}, "h").spec.outputs[0]
        Port(name='mean', dtype='float32', shape=(4,), high=None)
    """
    place = list(inputs).index(value)

    def step(weights: Any, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *rows, mean, top, total = given
        scored = score(weights, *rows)
        high = torch.maximum(top, scored)
        before, now = total * torch.exp(top - high), torch.exp(scored - high)
        return (mean * before + rows[place] * now) / (before + now), high, before + now

    carried: dict[str, Row] = {"mean": inputs[value], "top": 1, "total": 1}
    return own_cell(name, step, {**inputs, **carried}, "mean top total", options=None, **modules)


def _names(graph: CellGraph, cell: str) -> tuple[list[str], list[str]]:
    """Return the names of a cell's inputs and outputs."""
    spec = graph.layout.cells[graph.layout.cell_number(cell)]
    return [port.name for port in spec.inputs], [port.name for port in spec.outputs]
