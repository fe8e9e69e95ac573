"""Kernels of linear layers in training (native/gemm.h): GEMMs with epilogues, and the gradient of the weights.

Weights change at each step, so a GEMM packs them first, which costs little compared with many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.operators.shapes import copy
from mlsys_nimble.ir.operators import Gemm, WeightGradient
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.ir.strides import Strides, dense, order_of, row_major
from mlsys_nimble.training.kernels import load


def strides_of_results(operator: Operator, inputs: Sequence[View]) -> list[Strides] | None:
    """Return the strides of a :class:`Gemm`'s or :class:`WeightGradient`'s results; None: torch runs it.

    A GEMM's rows are ordered like its residual's, or else its mask's or its input's; gradients are row-major.
    """
    kind, (a, b) = operator.kind, inputs[:2]
    lanes = load().kernel_lanes()
    if any(view.dtype != "float32" or 0 in view.shape for view in inputs) or a.strides[-1] != 1 or len(a.shape) > 4:
        return None
    if isinstance(kind, WeightGradient):
        if a.shape[-1] % lanes or b.shape[-1] % lanes or b.strides[-1] != 1 or a.shape[:-1] != b.shape[:-1]:
            return None
        return [dense((a.shape[-1], b.shape[-1]), row_major(2)), *([(1,)] if kind.has_bias else [])]
    if not isinstance(kind, Gemm) or b.shape[1] % lanes or 1 not in b.strides:
        return None
    if kind.has_bias and inputs[2].strides != (1,):
        return None
    shape = (*a.shape[:-1], b.shape[1])
    others = inputs[2 + kind.has_bias :]
    like = others[-1] if others else a
    strides = dense(shape, (*order_of(like.shape[:-1], like.strides[:-1]), len(shape) - 1))
    views = _rows([a, *others, View(0, "float32", shape, strides)])
    is_even = all(view.strides[-1] == 1 for view in others) and all(len(view.shape) == 1 for view in views[1:])
    return [strides] if is_even else None


def _rows(views: Sequence[View]) -> list[View]:
    """Return views of the rows' first elements, ordered like the last view; the first may keep its own dimensions."""
    rows = [view.reshaped(view.shape[:-1], view.strides[:-1]) for view in views]
    merged = loops.merged(rows)
    if len(merged) > 1 and len(merged[-1].shape) > 1:
        merged[1:] = loops.merged(rows[1:])
    return merged


def make_kernels(kind: Gemm | WeightGradient, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernels of an operator that :func:`strides_of_results` takes."""
    if isinstance(kind, WeightGradient):
        dy, x = inputs
        dy_rows, x_rows = loops.merged([view.reshaped(view.shape[:-1], view.strides[:-1]) for view in inputs])
        arguments = {
            "dy": dy_rows,
            "x": x_rows,
            "weight": outputs[0],
            "bias": outputs[1] if kind.has_bias else None,
            "M": dy.shape[-1],
            "N": x.shape[-1],
            "threads": torch.get_num_threads(),
        }
        return [Kernel(load(), "weight_gradient", arguments)]
    a, b, *rest = inputs
    k, n = b.shape
    packed = torch.empty(k * n)
    bias = rest.pop(0) if kind.has_bias else None
    a_rows, *others, out_rows = _rows([a, *rest, outputs[0]])
    mask = others.pop(0) if kind.has_mask else None
    residual = others[0] if others else None
    gemm = {
        "a": a_rows,
        "out": out_rows,
        "residual": residual,
        "mask": mask,
        "bias": bias,
        "weights": packed.data_ptr(),
        "K": k,
        "N": n,
        "is_relu": kind.epilogue.activation == "relu",
    }
    return [_pack(b, packed), Kernel(load(), "gemm", gemm, packed)]


def _pack(b: View, to: torch.Tensor) -> Kernel:
    """Bind a copy of [K, N] to vectors of columns: [N / lanes, K, lanes]."""
    k, n = b.shape
    lanes = load().kernel_lanes()
    down, along = b.strides
    x = b.reshaped((n // lanes, k, lanes), (lanes * along, down, along))
    return copy(x, View(to.data_ptr(), b.dtype, x.shape, (k * lanes, lanes, 1)))
