"""Model as one function of its tensors, for AOTAutograd to differentiate.

AOTAutograd (torch 2.13) rebuilds results whose own elements share memory, such as overlapping windows (``unfold``) of
a computed tensor, outside the graph. Their gradient is wrong there: elements that several windows share get only a
part. So a copy is returned, and gradients pass through the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mlsys_nimble.capture import traceable
from mlsys_nimble.errors import call_external, refuse


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


_ADVICE = "Register a buffer of the new tensor's shape and write to it: self.state.copy_(new)."
_Tensors = dict[str, Tensor]


def state_of(model: nn.Module) -> tuple[_Tensors, _Tensors]:
    """Return a model's parameters, and its buffers and plain tensor attributes, by path; tied ones once."""
    others = dict(model.named_buffers())
    seen = {id(tensor) for tensor in (*others.values(), *model.parameters())}
    for name, tensor in _plain_tensors(model).items():
        if id(tensor) not in seen:
            others[name] = tensor
            seen.add(id(tensor))
    return dict(model.named_parameters()), others


def as_function(model: nn.Module) -> Callable[..., Any]:
    """Return a function of a model's parameters, its other tensors (:func:`state_of`) and its arguments.

    It returns a tuple whose only item is the model's result.

    A tensor that forward assigns in place of a buffer or plain tensor is copied into the old one.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    first = {id(tensor): name for name, tensor in (*parameters.items(), *buffers.items())}
    # Each slot once: functional_call does not restore a module that it meets under two names.
    slots = {
        f"{path}.{name}".strip("."): first[id(tensor)]
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }

    def run(parameters: _Tensors, others: _Tensors, *args: Any, **kwargs: Any) -> Any:
        own = {**parameters, **others}
        given = {slot: own[name] for slot, name in slots.items()}
        plain = {name: tensor for name, tensor in others.items() if name not in buffers}
        with traceable(), _ByParts(), _plain_replaced(model, plain) as held:
            result = call_external(functional_call, model, given, args, kwargs, tie_weights=False)
        for name, tensor in others.items():
            new = given[name] if name in given else held.get(name)
            if new is not tensor:
                if not isinstance(new, Tensor) or (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
                    raise refuse(f"forward assigns another tensor to the attribute {name}", "", _ADVICE)
                tensor.copy_(new)
        added = [name for name in held if name not in plain]
        if added:
            raise refuse(f"forward assigns a new tensor to the attribute {added[0]}", "", _ADVICE)
        return (copied(result),)  # AOTAutograd returns a flat tuple as a list

    return run


class _ByParts(TorchFunctionMode):
    """Function mode that decomposes recurrent layers: no graph can hold what oneDNN's whole layer saves."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, an LSTM without oneDNN."""
        is_layer = getattr(func, "__name__", "") == "lstm"
        with torch.backends.mkldnn.flags(enabled=False) if is_layer else nullcontext():
            return call_external(func, *args, **(kwargs or {}))


def _plain_tensors(model: nn.Module) -> _Tensors:
    """Return the tensors, by path, that are plain attributes of modules: neither parameters nor buffers."""
    return {
        f"{path}.{name}".strip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


@contextmanager
def _plain_replaced(model: nn.Module, given: Mapping[str, Tensor]) -> Iterator[_Tensors]:
    """Replace plain tensors within the context; the yielded dictionary gets those present at its end."""
    before = _plain_tensors(model)
    stand_ins = {id(before[name]): tensor for name, tensor in given.items()}
    held: _Tensors = {}
    for name, tensor in before.items():
        _put(model, name, stand_ins.get(id(tensor), tensor))
    try:
        yield held
        after = _plain_tensors(model)
        tied = {name for name in before if name not in given}
        held.update((name, tensor) for name, tensor in after.items() if name not in tied)
    finally:
        for name in _plain_tensors(model):
            _put(model, name, before.get(name))


def _put(model: nn.Module, name: str, value: Any) -> None:
    path, _, attribute = name.rpartition(".")
    vars(model.get_submodule(path))[attribute] = value
