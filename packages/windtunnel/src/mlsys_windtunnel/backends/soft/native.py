"""Soft trees by the C++ kernel: forward and backward fused, for float32 on a CPU and without dropout.

``trees.py`` says the same in torch, for other devices, for dropout, and where there is no compiler.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel, Struct, bind, warn_without_kernels
from torch import Tensor

# Tensors of soft_trees.cpp's Group, and which of them have gradients.
_INPUTS = ("arguments", "columns", "feature", "scale", "threshold", "missing", "missing_value")
_TREES = ("path", "left", "right", "num_splits", "count", "leaf")
_TO = ("arguments", "columns", "threshold", "path", "count", "leaf")

SOFT_TREES = Kernel(
    Path(__file__).parents[2] / "native" / "soft_trees.cpp",
    # Unlike exact trees, soft ones promise no last bit to anybody: contraction halves the work.
    flags=("-ffp-contract=fast", "-fno-strict-aliasing", "-Wno-psabi"),
)


@lru_cache(maxsize=1)
def kernel() -> Any:
    """Load the compiled kernel; the first call ever on a machine builds it (seconds). None where that fails."""
    try:
        return bind(SOFT_TREES.load())
    except KernelUnavailableError as error:
        warn_without_kernels("WindTunnel's fine-tuning", "torch trains soft trees", error)
        return None


def is_native(columns: Tensor, *, drops: bool) -> bool:
    """Return whether the kernel can compute soft trees on these columns; ``drops``: leaves or splits are left out."""
    if columns.device.type != "cpu" or drops or torch.compiler.is_compiling():
        return False
    is_traced = torch.jit.is_tracing() or type(columns) is not Tensor  # type: ignore[attr-defined, no-untyped-call]
    return not is_traced and kernel() is not None


def sums(
    options: tuple[bool, float, float],
    inputs: dict[str, Tensor | None],
    group: dict[str, Tensor | None],
    *,
    trains_columns: bool,
) -> Tensor:
    """Compute the group's part of the scores, ``[outputs, rows]``.

    Args:
        options: Whether gates are tanh, their sharpness, and the sharpness of leaves.
        inputs: ``arguments`` ``[splits, rows]``; or ``columns`` ``[columns, rows]`` and, of the group's splits,
            ``feature``, ``scale``, ``threshold``, ``missing_value``, with ``missing`` ``[columns, rows]`` or None.
        group: Tensors of trees of one size, by name as in :data:`_TREES`.
        trains_columns: True if gradients of columns are wanted.
    """
    tensors = [inputs.get(name) for name in _INPUTS] + [group[name] for name in _TREES]
    result: Tensor = _Sums.apply(options, trains_columns, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Sums(torch.autograd.Function):
    """Tensors in the order of :data:`_INPUTS` and :data:`_TREES`."""

    @staticmethod
    def forward(ctx: Any, options: tuple[bool, float, float], trains_columns: bool, *tensors: Tensor | None) -> Tensor:
        kept = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        ctx.save_for_backward(*kept)
        ctx.options, ctx.trains_columns = options, trains_columns
        leaf = kept[-1]
        assert leaf is not None
        out = leaf.new_empty(leaf.shape[2], _num_rows(kept))
        kernel().mlsys_soft_forward(ctypes.byref(_group(options, kept)), out.data_ptr())
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        by_name = dict(zip((*_INPUTS, *_TREES), tensors, strict=True))
        wanted = dict(zip((*_INPUTS, *_TREES), ctx.needs_input_grad[2:], strict=True))
        wanted["columns"] = wanted["columns"] and ctx.trains_columns
        gradients = {
            name: (torch.empty_like if name == "arguments" else torch.zeros_like)(by_name[name])
            for name in _TO
            if wanted[name]
        }
        outputs = upstream[0].contiguous()
        library = kernel()
        addresses = {name: gradient.data_ptr() for name, gradient in gradients.items()}
        record = library.structs["Gradients"](outputs=outputs.data_ptr(), **addresses)  # those not wanted stay null
        library.mlsys_soft_backward(ctypes.byref(_group(ctx.options, tensors)), ctypes.byref(record))
        return (None, None, *(gradients.get(name) for name in (*_INPUTS, *_TREES)))


def _num_rows(tensors: list[Tensor | None]) -> int:
    table = tensors[0] if tensors[0] is not None else tensors[1]
    assert table is not None
    return table.shape[1]


def _group(options: tuple[bool, float, float], tensors: list[Tensor | None]) -> Struct:
    by_name = dict(zip((*_INPUTS, *_TREES), tensors, strict=True))
    leaf, columns = by_name["leaf"], by_name["columns"]
    left = by_name["left"]
    assert leaf is not None
    assert left is not None
    is_tanh, split_scale, leaf_scale = options
    group: type[Struct] = kernel().structs["Group"]
    return group(  # tensors that are absent stay null
        **{name: tensor.data_ptr() for name, tensor in by_name.items() if tensor is not None},
        num_trees=leaf.shape[0],
        splits=left.shape[1],
        leaves=leaf.shape[1],
        outputs=leaf.shape[2],
        rows=_num_rows(tensors),
        num_columns=0 if columns is None else columns.shape[0],
        split_scale=split_scale,
        leaf_scale=leaf_scale,
        is_tanh=is_tanh,
        num_threads=torch.get_num_threads(),
    )
