"""Model as one function of its tensors, for AOTAutograd to differentiate.

AOTAutograd (torch 2.13) rebuilds results whose own elements share memory, such as overlapping windows (``unfold``) of
a computed tensor, outside the graph. Their gradient is wrong there: elements that several windows share get only a
part. So a copy is returned, and gradients pass through the operator itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.functional_utils import has_data_mutation
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from mlsys_nimble.capture import traceable
from mlsys_nimble.capture.layouts import overlaps_itself
from mlsys_nimble.errors import call_external, refuse
from mlsys_nimble.state.held import Held


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
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return is_plain and value.requires_grad and overlaps_itself(value)


_ADVICE = (
    "Register a buffer of the new tensor's shape and write to it, self.state.copy_(new); call the model once before, "
    "if only its first call does that; or prepare with fallback='eager'."
)
_Tensors = dict[str, Tensor]
Contents = dict[int, tuple[Tensor, Tensor]]  # tensors by id, each with a copy


def state_of(model: nn.Module) -> tuple[_Tensors, _Tensors]:
    """Return a model's parameters, and its buffers and other tensors (:class:`Held`), by path; tied ones once."""
    others = dict(model.named_buffers())
    seen = {id(tensor) for tensor in (*others.values(), *model.parameters())}
    for name, _, _, tensor in Held(model).tensors():
        if id(tensor) not in seen:
            others[name] = tensor
            seen.add(id(tensor))
    return dict(model.named_parameters()), others


class Function:
    """Function of a model's parameters, its other tensors (:func:`state_of`) and its arguments.

    It returns the model's result, and by path the tensors that forward has put in the place of others without reading
    those, as ``weight_norm`` does: :meth:`keep` puts them there. Others are copied into those that they replace.

    Args:
        model: The model.
        contents: Filled with the content of tensors that forward writes to, when it is traced.
    """

    def __init__(self, model: nn.Module, contents: Contents | None = None) -> None:
        self._model = model
        self._names = {id(tensor): name for tensors in state_of(model) for name, tensor in tensors.items()}
        self._places = {name: (container, key) for name, container, key, _ in Held(model).tensors()}
        self._contents = contents
        self.kept: list[tuple[Any, Any]] = []  # containers and keys of what it returns beside the result
        for name, _ in model.named_parameters():
            if name not in self._places:
                raise refuse(f"the parameter {name} of a module in TorchScript", "", "Give what it was made of.")

    def keep(self, tensors: _Tensors) -> None:
        """Put tensors where forward puts them."""
        self.kept = [self._places[name] for name in tensors]
        for (container, key), tensor in zip(self.kept, tensors.values(), strict=True):
            container[key] = tensor

    def __call__(self, parameters: _Tensors, others: _Tensors, *args: Any, **kwargs: Any) -> Any:
        """Run the model on other tensors than its own."""
        given, contents = {**parameters, **others}, self._contents
        with traceable(), Held(self._model) as own:
            put: dict[int, Tensor] = {}  # own tensors by id of their stand-ins
            tied: set[int] = set()
            for _, container, key, tensor in own.tensors():
                container[key] = stand_in = given[self._names[id(tensor)]]
                tied.update([id(stand_in)] if id(stand_in) in put else [])
                put[id(stand_in)] = tensor
            held = Held(self._model)
            with _Calls() as calls:
                result = call_external(self._model, *args, **kwargs)
            kept: _Tensors = {}
            states: list[tuple[Tensor, Tensor]] = []
            changed = [*held.changed()]
            read = {*calls.read, *map(id, tree_leaves((result, [new for _, _, new in changed])))}
            for name, old, new in changed:
                leaves = [leaf for leaf in tree_leaves((old, new)) if isinstance(leaf, Tensor)]
                if not isinstance(old, Tensor) and all(id(leaf) in put for leaf in leaves):
                    continue  # as a list of the weights
                if not isinstance(old, Tensor) or not isinstance(new, Tensor):
                    raise refuse(f"forward assigns a new value to the attribute {name}", "", _ADVICE)
                is_like = (new.shape, new.dtype) == (old.shape, old.dtype)
                if name not in parameters and id(old) not in read:
                    kept[name] = new
                elif is_like and not new.requires_grad and id(old) not in tied:
                    states.append((old, new))
                else:
                    raise refuse(f"forward assigns another tensor to the attribute {name}", "", _ADVICE)
            if states:  # each is read before one is written
                kept = {name: new.clone() for name, new in kept.items()}
                for old, new in [(old, new.clone()) for old, new in states]:
                    old.copy_(new)
            for stand_in in given.values():
                if contents is not None and isinstance(stand_in, FunctionalTensor) and has_data_mutation(stand_in):
                    tensor = put[id(stand_in)]
                    with _disable_current_modes(), torch.no_grad():
                        contents[id(tensor)] = tensor, tensor.detach().clone()
        return copied((result, kept))


class _Calls(TorchFunctionMode):
    """Function mode that decomposes recurrent layers: no graph can hold what oneDNN's whole layer saves.

    ``read`` gets the tensors, by id, that functions of torch were called with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, an LSTM without oneDNN."""
        leaves = tree_leaves((args, kwargs))
        self.read.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, Tensor))
        is_layer = getattr(func, "__name__", "") == "lstm"
        with torch.backends.mkldnn.flags(enabled=False) if is_layer else nullcontext():
            return call_external(func, *args, **(kwargs or {}))
