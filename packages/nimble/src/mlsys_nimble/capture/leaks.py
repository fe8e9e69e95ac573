"""Guard against values that leave torch without a dispatched operator, which the tracer cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mlsys_nimble.capture.dispatched import VIEWS_IN_PLACE
from mlsys_nimble.capture.layouts import ASKS_STRIDES, MAY_BE_VIEWS
from mlsys_nimble.capture.sources import Site
from mlsys_nimble.capture.tracer import BRANCH, CUSTOM, Tracer
from mlsys_nimble.capture.watched import Questions, ask_stops, read_whole
from mlsys_nimble.errors import call_external, refuse

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_depth = torch._C._functorch.get_dynamic_layer_stack_depth
_INTERFACE = torch.Tensor.__cuda_array_interface__.__get__


class LeakGuard(TorchFunctionMode):
    """Function mode that refuses calls by which values leave torch without a dispatched operator."""

    _LEAKS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
    _ADDRESS = "data_ptr"  # kernels outside torch, such as Triton's, read and write there

    def __init__(self, tracer: Tracer, site: Callable[[], Site], questions: Questions | None = None) -> None:
        super().__init__()
        self._tracer = tracer
        self._site = site
        self._questions = questions

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` unless it is such a call."""
        caught = self._tracer.caught
        before = caught.first
        with caught:
            result = self._checked(func, args, kwargs or {})
        caught.first = before  # what torch itself has caught, as where it tries one overload after the other
        return result

    def _checked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        self._tracer.casts.note()
        if isinstance(func, torch.ScriptMethod):
            args = args[1:]  # the module, to which the method is bound
        if name in self._LEAKS and isinstance(args[0], torch.Tensor):
            if not self._tracer.is_fixed(args[0]):
                what = f"Tensor.{name}: the model's Python code asks for the values of a tensor computed from inputs"
                raise refuse(what, self._site().source, BRANCH)
            self._tracer.reads_values = True
        asks_gradient = name == "requires_grad_" and torch.is_grad_enabled()
        if (func is torch.autograd.grad or name == "backward" or asks_gradient) and not _depth():
            advice = "Prepare with training=True, which replays them too, or with fallback='eager'."
            raise refuse("forward takes gradients itself (autograd.grad)", self._site().source, advice)
        if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
            advice = "Pad sequences to one length and mask them, or prepare with fallback='eager'."
            raise refuse("a packed sequence, whose sizes depend on lengths", self._site().source, advice)
        if name in VIEWS_IN_PLACE and (args[0].is_neg() or args[0].is_conj()):
            what = f"{name} of a tensor that carries a bit for its sign or conjugate"
            raise refuse(what, self._site().source, "Use an operator that returns a new tensor.")
        asks_address = name == self._ADDRESS or func == _INTERFACE
        if asks_address and not self._tracer.is_fixed(args[0]):
            what = "a kernel that is no operator of torch's asks where a tensor computed from inputs lies"
            raise refuse(what, self._site().source, CUSTOM)
        if self._questions is not None and name == "__getitem__":
            return self._item(func, *args)
        if name == "__set__" and func == _SET_DATA:
            what = "forward gives a tensor another memory (x.data = ...)"
            raise refuse(what, self._site().source, "Write to it: x.copy_(new).")
        if name in ASKS_STRIDES and self._tracer.is_computed(args[0]):
            self._tracer.asks_strides = True
        if name == "storage_offset" and self._tracer.is_computed(args[0]):
            what = "the model's Python code asks where a tensor computed from inputs begins in its memory"
            raise refuse(what, self._site().source, "Call contiguous().clone() before, or use slices.")
        result = call_external(func, *args, **kwargs)
        if name in MAY_BE_VIEWS and isinstance(result, torch.Tensor):
            self._tracer.may_share(args[0], result)
        if self._questions is None:
            return result
        if name == "__len__":
            self._questions.used(result)
        return self._questions.wrapped(result)

    def _item(self, func: Any, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        """Index a tensor, and have torch take slices of all elements as well: see :func:`read_whole`."""
        assert self._questions is not None
        ask_stops(self._questions, index, tuple(tensor.shape))
        index, slices = read_whole(index, tuple(tensor.shape))
        result: torch.Tensor = call_external(func, tensor, index)
        for dim, start, stop in slices:
            result = call_external(torch.ops.aten.slice.Tensor, result, dim, start, stop)
        return result
