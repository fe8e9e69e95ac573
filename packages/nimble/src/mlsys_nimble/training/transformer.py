"""Kernels of transformer layers in training: linear layers, layer norms, and attention over short sequences.

Linear layers (native/gemm.h) are GEMMs with epilogues, and the gradient of the weights. Weights change at each step, so
a GEMM packs them first, which costs little compared with many rows. The others: native/layer_norm.h, attention.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.operators.shapes import copy
from mlsys_nimble.ir.operators import Aten, Gemm, Input, WeightGradient
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.ir.strides import Strides, dense, order_of, row_major
from mlsys_nimble.training.kernels import load


def linear_strides(operator: Operator, inputs: Sequence[View]) -> list[Strides] | None:
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


def linear_kernels(kind: Gemm | WeightGradient, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernels of an operator that :func:`linear_strides` takes."""
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
    packed = torch.empty(k * n, dtype=torch.float32)
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


_NORM = "aten.native_layer_norm.default"
_NORM_GRADIENT = "aten.native_layer_norm_backward.default"

_NORM_VIEWS = ("x", "y", "mean", "rstd", "dy", "weight", "bias", "dweight", "dbias")


def norm_strides(operator: Operator, inputs: Sequence[View]) -> list[Strides] | None:
    """Return the strides of the results if kernels make them, in the order of x's; None: torch runs it.

    Kernels take float32 rows of whole vectors with weight and bias, and all three gradients. Statistics are row-major.
    """
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target not in (_NORM, _NORM_GRADIENT) or kind.keywords:
        return None
    is_gradient = kind.target == _NORM_GRADIENT
    if len(inputs) != (6 if is_gradient else 3):  # without weight or bias
        return None
    x, weight = inputs[is_gradient], inputs[4 if is_gradient else 1]
    wanted = (Input(0), Input(1), x.shape[-1:], *map(Input, range(2, 6)), (True, True, True))
    if kind.arguments[:-1] != (Input(0), x.shape[-1:], Input(1), Input(2)) and kind.arguments != wanted:
        return None
    if any(view.dtype != "float32" or 0 in view.shape for view in inputs) or x.shape[-1] % load().kernel_lanes():
        return None
    rows = [view for view in inputs if view.shape == x.shape]
    if weight.shape != x.shape[-1:] or any(view.strides[-1] != 1 for view in (*rows, weight, inputs[-1])):
        return None
    order = (*order_of(x.shape[:-1], x.strides[:-1]), len(x.shape) - 1)
    strides, width = dense(x.shape, order), x.shape[-1:]
    if is_gradient:
        return [strides, dense(width, (0,)), dense(width, (0,))]
    statistics = dense((*x.shape[:-1], 1), row_major(len(x.shape)))
    return [strides, statistics, statistics]


def norm_kernels(operator: Operator, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernels of an operator that :func:`norm_strides` takes."""
    kind = operator.kind
    assert isinstance(kind, Aten)
    if kind.target == _NORM:
        x, weight, bias = inputs
        y, mean, rstd = outputs
        rows = _norm_rows([x, mean, rstd, y])
        views = {"x": rows[0], "mean": rows[1], "rstd": rows[2], "y": rows[3], "weight": weight, "bias": bias}
        return [Kernel(load(), "layer_norm_forward", _norm_arguments(views, x, kind.arguments[-1]))]
    dy, x, mean, rstd, weight, _ = inputs
    dx, dweight, dbias = outputs
    rows = _norm_rows([dy, x, mean, rstd, dx])
    views = dict(zip(("dy", "x", "mean", "rstd", "y"), rows, strict=True))
    views |= {"weight": weight, "dweight": dweight, "dbias": dbias}
    sums = Kernel(load(), "layer_norm_backward", _norm_arguments(views, x, 0.0))
    return [sums, Kernel(load(), "layer_norm_finish", sums)]


def _norm_rows(views: Sequence[View]) -> list[View]:
    """Return views of the rows' first elements, ordered like the last view."""
    assert prod(views[0].shape)
    return loops.merged([view.reshaped(view.shape[:-1], view.strides[:-1]) for view in views])


def _norm_arguments(views: dict[str, View], x: View, eps: float) -> dict[str, Any]:
    return {**{name: views.get(name) for name in _NORM_VIEWS}, "width": x.shape[-1], "eps": eps}


_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_ATTENTION_GRADIENT = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
MOST_SCORES = 128 * 1024  # of one head: more do not fit the second-level cache, and torch's blocks are faster


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention or its gradients.

    Inputs are q, k, v; of the gradients dout, q, k, v, out, logsumexp. Results: out and logsumexp; or dq, dk, dv.
    """

    is_gradient: bool
    is_causal: bool
    scale: float | None  # None: one over the root of the features


def attention_of(operator: Operator, inputs: Sequence[View]) -> AttentionWork | None:
    """Return the work that kernels can compute: float32, no mask, no dropout, few scores; or None."""
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target not in (_ATTENTION, _ATTENTION_GRADIENT):
        return None
    is_gradient = kind.target == _ATTENTION_GRADIENT
    count = 6 if is_gradient else 3
    keywords: dict[str, Any] = dict(kind.keywords)
    rest = (*kind.arguments[count:], *((0.0, False)[len(kind.arguments) - count :]))
    if kind.arguments[:count] != tuple(map(Input, range(count))) or len(inputs) != count or len(rest) != 2:
        return None
    q, k, v = inputs[1:4] if is_gradient else inputs
    is_plain = rest[0] == 0.0 and keywords.get("attn_mask") is None and all(view.dtype == "float32" for view in inputs)
    rows = [view for view in inputs if len(view.shape) == 4]
    lies_well = all(view.strides[3] == 1 for view in rows) and q.shape[3] == v.shape[3]
    fits = 0 < q.shape[2] * k.shape[2] <= MOST_SCORES and q.shape[:2] == k.shape[:2]
    if not (is_plain and lies_well and fits) or q.shape[3] % load().kernel_lanes():
        return None
    return AttentionWork(is_gradient, bool(rest[1]), keywords.get("scale"))


def attention_strides(work: AttentionWork, inputs: Sequence[View]) -> list[Strides]:
    """Return dense strides in the order of q's, so that heads split from one row are joined without a copy."""
    q, k, v = inputs[1:4] if work.is_gradient else inputs
    if work.is_gradient:
        return [dense(view.shape, order_of(q.shape, q.strides)) for view in (q, k, v)]
    return [dense(q.shape, order_of(q.shape, q.strides)), dense(q.shape[:3], row_major(3))]


def attention_kernels(work: AttentionWork, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernel; :class:`AttentionWork` lists inputs and outputs."""
    q, k, v = inputs[1:4] if work.is_gradient else inputs
    assert prod(q.shape)
    out, logsumexp = inputs[4:] if work.is_gradient else outputs
    dout, gradients = (inputs[0], outputs) if work.is_gradient else (None, (None, None, None))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "logsumexp": logsumexp,
        "dout": dout,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        "scale": q.shape[3] ** -0.5 if work.scale is None else work.scale,
        "is_causal": work.is_causal,
    }
    return [Kernel(load(), "attention_backward" if work.is_gradient else "attention_forward", arguments)]
