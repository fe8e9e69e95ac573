"""Results whose own elements share memory, such as overlapping windows (``unfold``) of a computed tensor.

AOTAutograd (torch 2.13) rebuilds such a view outside the graph, where its gradient is wrong: elements that several
windows share get only a part. So a copy is returned, and gradients pass through the operator itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def overlaps(tensor: Tensor) -> bool:
    """Return whether two elements may share memory, but for dimensions of stride 0 (``expand``), which work."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def copied(results: Any) -> Any:
    """Return a model's results, with copies of those that overlap."""
    return tree_map(lambda value: value.clone() if _is_wrong(value) else value, results)


def copy_in_graph(graph: torch.fx.GraphModule) -> None:
    """Make a graph of dynamo return copies of results that overlap."""
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    for node in output.all_input_nodes:
        if _is_wrong(node.meta.get("example_value")):
            with graph.graph.inserting_before(output):
                output.replace_input_with(node, graph.graph.call_method("clone", (node,)))
    graph.recompile()


def _is_wrong(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.requires_grad and overlaps(value)
