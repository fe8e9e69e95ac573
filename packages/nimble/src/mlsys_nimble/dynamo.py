"""``torch.compile(model, backend="nimble")``: Nimble schedules each graph that dynamo finds.

Dynamo passes parameters and buffers as arguments. They count as the model's own and are checked before every call: when
one has been replaced or changed, its graph is prepared again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mlsys_nimble.calls import PreparedCalls
from mlsys_nimble.errors import CaptureError, first_line
from mlsys_nimble.modes import modes_restored
from mlsys_nimble.options import Options, make_options
from mlsys_nimble.ranged import MAX_SYMBOLS, Ranges, VaryingDim

MOST = 4096  # largest size where dynamo leaves the range open; larger ones are prepared one by one

_LOG = logging.getLogger("mlsys_nimble")


def nimble(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Compile a graph of dynamo: the backend ``"nimble"`` of torch.compile.

    A graph that needs gradients is replayed forward and backward; one that Nimble refuses runs eagerly, with a warning.
    ``torch.compile(..., options={...})`` takes the fields of :class:`~mlsys_nimble.options.Options`.
    """
    compiled: Callable[..., Any] = backend(make_options(options or {}))(graph, example_inputs)
    return compiled


def backend(options: Options, made: list[PreparedCalls] | None = None) -> Callable[..., Any]:
    """Return a backend with these options; ``made`` receives the calls of each graph scheduled for inference."""

    def compile_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _trained(graph, example_inputs, options)
        turns_on = any(node.target is torch._C._set_grad_enabled and node.args == (True,) for node in graph.graph.nodes)
        if turns_on or not any(node.op.startswith("call") for node in graph.graph.nodes):
            return graph  # within it autograd is at work
        graph.meta["has_gradients"] = torch.is_grad_enabled()  # those of each call: dynamo guards them
        owned = [index for index, item in enumerate(example_inputs) if _is_owned(item)]
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        symbolic = [node.meta.get("example_value") for node in placeholders]
        ranges = _ranges_of(symbolic, owned, options)
        scheduled = _ScheduledGraph(graph, owned, options, ranges, _take_numbers(graph))
        if made is not None:
            made.append(scheduled.calls)
        return scheduled

    return compile_graph


def _take_numbers(graph: torch.fx.GraphModule) -> list[int]:
    """Have a graph take numbers where dynamo wraps them in tensors to call ``item``; return the arguments' indices."""
    found: list[int] = []
    for index, node in enumerate([node for node in graph.graph.nodes if node.op == "placeholder"]):
        users = list(node.users)
        if users and all(user.op == "call_method" and user.target == "item" for user in users):
            found.append(index)
            for user in users:
                user.replace_all_uses_with(node)
                graph.graph.erase_node(user)
    if found:
        graph.recompile()
    return found


def _ranges_of(symbolic: Sequence[Any], owned: Sequence[int], options: Options) -> Ranges | None:
    """Return the sizes that dynamo holds to vary; None if there are none, or one that is not a symbol.

    Args:
        symbolic: The graph's arguments with sizes as dynamo sees them.
        owned: Indices of the model's own among them.
        options: By which the graph is prepared.
    """
    dims: list[VaryingDim] = []
    bounds: dict[str, tuple[int, int]] = {}
    for index, item in enumerate(symbolic):
        is_size = isinstance(item, torch.SymInt)
        sizes = [item] if is_size else item.shape if isinstance(item, torch.Tensor) else []
        for dim, size in enumerate(sizes):
            if not isinstance(size, torch.SymInt):
                continue
            expression = size.node.expr
            if expression.is_number:
                continue
            if index in owned or not expression.is_Symbol:
                return None
            least = size.node.shape_env.var_to_range[expression].lower
            most = size.node.shape_env.var_to_range[expression].upper
            bounds[str(expression)] = int(max(least, 2)), int(min(most, MOST))  # either may be infinite
            dims.append(VaryingDim(index, None if is_size else dim, str(expression)))
    if not 0 < len(bounds) <= MAX_SYMBOLS or options.executor not in ("auto", "native"):
        return None
    return Ranges(tuple(dims), bounds, tries_ends=False)


def _trained(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Return a function that replays the graph's forward and backward graphs."""
    from torch._dynamo.backends.common import aot_autograd

    from mlsys_nimble.training.calls import executor_maker
    from mlsys_nimble.training.graphs import Partition, ReplayedGraph
    from mlsys_nimble.training.state import copy_in_graph

    copy_in_graph(graph)
    partition = Partition(rematerialises=options.rematerialises)

    def forward(part: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        maker = executor_maker(options, saves=True)
        replayed = ReplayedGraph(part, maker, num_results=partition.num_results, falls_back=True)
        return replayed.as_function()

    def backward(part: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return ReplayedGraph(part, executor_maker(options, saves=False), falls_back=True).as_function()

    compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
    try:
        with modes_restored():
            compiled: Callable[..., Any] = compiler(graph, example_inputs)
    except Exception as error:  # noqa: BLE001 - AOTAutograd's own limits have no class in common
        _LOG.warning("a graph trains eagerly: %s: %s", type(error).__name__, first_line(error))
        return graph
    return compiled


def _is_owned(item: Any) -> bool:
    """Return whether an argument is a parameter or buffer of the compiled model."""
    return isinstance(item, nn.Parameter) or getattr(item, "_dynamo_static_input_type", None) is not None


class _ScheduledGraph:
    """Graph that is prepared when first called: only then are its arguments real tensors."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        owned_indices: list[int],
        options: Options,
        ranges: Ranges | None,
        numbers: list[int],
    ) -> None:
        self._graph = graph
        self._numbers = numbers  # indices of arguments that the graph takes as numbers
        self._owned_indices = owned_indices
        self.calls = PreparedCalls(graph, options, fixed_indices=owned_indices)
        if ranges is not None:
            self.calls.serve(ranges)
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._is_eager = False

    def __call__(self, *inputs: Any) -> Any:
        if self._numbers:
            inputs = tuple([item.item() if n in self._numbers else item for n, item in enumerate(inputs)])
        if self._is_eager:
            return self._graph(*inputs)
        owned = [inputs[index] for index in self._owned_indices]
        if not self._is_fresh(owned):
            self.calls.clear()
        try:
            with torch.no_grad():
                result = self.calls.call(inputs, {})
        except CaptureError as error:
            _LOG.warning("a graph runs eagerly: %s", error)
            self._is_eager = True
            return self._graph(*inputs)
        self._seen = [(tensor, tensor._version) for tensor in owned]
        return result

    def _is_fresh(self, owned: list[torch.Tensor]) -> bool:
        return len(owned) == len(self._seen) and all(
            tensor is seen and tensor._version == version
            for tensor, (seen, version) in zip(owned, self._seen, strict=True)
        )
