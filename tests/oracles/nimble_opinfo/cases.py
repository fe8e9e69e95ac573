"""Calls of single operators that torch's own test data (OpInfo) holds, and variants of them that view and write.

A case is a function of plain tensors, and those tensors. Views are taken *inside* the function: a prepared model gets
its inputs row by row, so only there do strides reach its passes, layouts and kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# The import of torch's tests forbids to set flags of torch.backends, for the whole process.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

DTYPES = ("float32", "float64", "bfloat16", "complex64", "int32", "int64", "bool")
VARIANTS = ("plain", "strided", "transposed", "expanded", "empty", "scalar", "in place", "written input", "out")
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")  # any values do
EAGER_CRASHES = {"_chunk_cat": ("scalar",)}  # torch itself ends the process

Function = Callable[..., Any]


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call it."""
        return self.function(*tensors)


@dataclass(frozen=True)
class Case:
    """One call: the function and its tensors, which each run gets clones of."""

    name: str
    function: Function
    tensors: tuple[torch.Tensor, ...]
    has_set_values: bool = True  # False: only shapes and dtypes can be compared


def operators() -> list[OpInfo]:
    """All operators that torch has test data for.

    Random ones draw from the generator as it is: OpInfo's wrappers seed it within the call, which is the caller's part.
    """
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(op_db)


def label_of(info: OpInfo) -> str:
    """Its name, and which of its entries of that name it is."""
    return info.name + (f" ({info.variant_test_name})" if info.variant_test_name else "")


def cases_of(info: OpInfo, dtype: str, *, most_samples: int, variants: Sequence[str] = VARIANTS) -> Iterator[Case]:
    """The cases of an operator for a dtype: samples spread over OpInfo's own, each in the variants that it allows."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if torch_dtype not in info.supported_dtypes("cpu"):
        return
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(info.sample_inputs("cpu", torch_dtype, requires_grad=False))
    for number in _spread(len(samples), most_samples):
        for variant in variants:
            if variant in EAGER_CRASHES.get(info.name, ()):
                continue
            made = _MAKERS[variant](info, samples[number])
            if made is not None:
                yield Case(
                    f"{label_of(info)} {dtype} #{number} {variant}", *made, has_set_values=info.name not in UNSET
                )


def _spread(count: int, most: int) -> list[int]:
    """Numbers below ``count``, at most ``most``, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / max(most - 1, 1)) for index in range(most)})


Made = tuple[Function, tuple[torch.Tensor, ...]]


def _plain(info: OpInfo, sample: SampleInput, operator: Function | None = None) -> Made:
    leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    call = operator or info.op

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return call(first, *args, **kwargs)

    return function, tuple(leaves[place].detach() for place in places)


def _viewed(base_of: Function, view_of: Function) -> Callable[[OpInfo, SampleInput], Made | None]:
    """Tensors are views of what is passed: ``view_of(base, like)``, where ``base_of(tensor)`` is passed."""

    def make(info: OpInfo, sample: SampleInput) -> Made | None:
        function, tensors = _plain(info, sample)
        if not any(tensor.dim() for tensor in tensors) or not all(map(_is_dense, tensors)):
            return None
        likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        bases = tuple(base_of(tensor) for tensor in tensors)

        def viewed(*given: torch.Tensor) -> Any:
            return function(*(view_of(base, like) for base, like in zip(given, likes, strict=True)))

        return viewed, bases

    return make


def _reduced(part_of: Function) -> Callable[[OpInfo, SampleInput], Made | None]:
    """Tensors are replaced by a part of themselves."""

    def make(info: OpInfo, sample: SampleInput) -> Made | None:
        function, tensors = _plain(info, sample)
        if (
            not tensors
            or not all(map(_is_dense, tensors))
            or all(part_of(tensor).shape == tensor.shape for tensor in tensors)
        ):
            return None
        return function, tuple(part_of(tensor).contiguous() for tensor in tensors)

    return make


def _in_place(*, of_input: bool) -> Callable[[OpInfo, SampleInput], Made | None]:
    def make(info: OpInfo, sample: SampleInput) -> Made | None:
        operator = info.inplace_variant
        if operator is None or not isinstance(sample.input, torch.Tensor):
            return None

        def write(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            first = first if of_input else first.clone()
            operator(first, *args, **kwargs)
            return first.clone()

        return _plain(info, sample, write)

    return make


def _out(info: OpInfo, sample: SampleInput) -> Made | None:
    if not info.supports_out or not isinstance(sample.input, torch.Tensor):
        return None
    function, tensors = _plain(info, sample)
    try:
        expected = function(*tensors)
    except Exception:  # noqa: BLE001
        return None
    shapes = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    is_single = isinstance(expected, torch.Tensor)

    def write(*args: Any, **kwargs: Any) -> Any:
        outs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        info.op(*args, **kwargs, out=outs[0] if is_single else outs)
        return outs

    return _plain(info, sample, write)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _strided_base(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1) if tensor.dim() else tensor


def _transposed_base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous() if tensor.dim() else tensor


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.narrow(0, 0, min(1, tensor.shape[0])).contiguous() if tensor.dim() else tensor


_MAKERS: dict[str, Callable[[OpInfo, SampleInput], Made | None]] = {
    "plain": _plain,
    "strided": _viewed(_strided_base, lambda base, like: base.select(-1, 0) if like.dim() else base),
    "transposed": _viewed(_transposed_base, lambda base, like: base.permute(*reversed(range(base.dim())))),
    "expanded": _viewed(_first, lambda base, like: base.expand(like.shape)),
    "empty": _reduced(lambda tensor: tensor.narrow(0, 0, 0) if tensor.dim() else tensor),
    "scalar": _reduced(lambda tensor: tensor.reshape(-1)[0] if tensor.numel() else tensor),
    "in place": _in_place(of_input=False),
    "written input": _in_place(of_input=True),
    "out": _out,
}
