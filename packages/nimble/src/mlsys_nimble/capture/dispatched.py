"""Facts about a dispatched operator, by its name, tags and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_WHOLE = frozenset(
    {
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        # These raise for invalid values, and a replay must raise too.
        *("linalg_cholesky", "linalg_inv", "linalg_solve", "linalg_lu_factor", "linalg_ldl_factor", "one_hot"),
    }
)
STATIC_CHECKS = ("aten._assert_tensor_metadata", "aten.sym_constrain_range", "aten._assert_scalar")
_ANY_STRIDES = (
    "conv",
    "upsample",
    "max_pool",
    "avg_pool",
    "adaptive_",
    "native_batch_norm",
    "batch_norm",
    "_native_batch",
)
_VIEWS_IN_PLACE = {
    "detach_": "detach",
    "transpose_": "transpose",
    "t_": "t",
    "squeeze_": "squeeze",
    "unsqueeze_": "unsqueeze",
    "swapaxes_": "swapaxes",
    "swapdims_": "swapdims",
}


def is_whole(func: Any) -> bool:
    """Return whether a composite operator is recorded whole: torch runs it faster, or it checks values."""
    return func._schema.name.removeprefix("aten::") in _WHOLE


def takes_any_strides(name: str) -> bool:
    """Return whether torch runs an operator well on channels-last images, whatever strides eager had."""
    return name.removeprefix("aten.").startswith(_ANY_STRIDES)


def view_of(func: Any) -> Callable[..., torch.Tensor] | None:
    """Return the view that an operator such as ``transpose_`` makes of its argument; None if it makes none."""
    name = _VIEWS_IN_PLACE.get(func._schema.name.removeprefix("aten::"), "")
    return getattr(torch.ops.aten, name, None)


def read_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Return the tensors whose values decide a number or a shape that an operator gives; None if none can."""
    if torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags:
        return None
    name = str(func)
    if _is_sized(name, args, kwargs):
        return None
    if name == "aten.index.Tensor":
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def is_row_by_row(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is row-major and has its memory to itself."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _is_sized(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an argument fixes the shape of a result; a replay raises for values that do not fit."""
    if name == "aten.one_hot.default":
        return len(args) > 1 and args[1] >= 0
    return name == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is not None
