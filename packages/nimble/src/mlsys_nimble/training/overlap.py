"""Results whose own elements share memory, such as overlapping windows (``unfold``) of what the model has computed.

AOTAutograd (torch 2.13) builds such a view again outside of the graph, where its gradient is wrong: of elements that
several windows share only a part arrives. So a copy is the result; gradients then pass through the operator itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def overlaps(tensor: Tensor) -> bool:
    """Say if two elements may share memory. Dimensions of stride 0 (``expand``) do not count: they are handled well."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def copied(results: Any) -> Any:
    """Return a model's results, those that overlap in copies."""
    return tree_map(lambda value: value.clone() if _is_wrong(value) else value, results)


def copy_in_graph(graph: torch.fx.GraphModule) -> None:
    """Let a graph of dynamo's return copies of results that overlap."""
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    for node in output.all_input_nodes:
        if _is_wrong(node.meta.get("example_value")):
            with graph.graph.inserting_before(output):
                output.replace_input_with(node, graph.graph.call_method("clone", (node,)))
    graph.recompile()


def _is_wrong(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.requires_grad and overlaps(value)
