"""Products of computed matrices, and attention (attention.h)."""

from __future__ import annotations

from typing import Any

import torch
from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View, load
from mlsys_nimble.backends.reference.pointwise import with_epilogue
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FAMILY = Family()


@FAMILY.meaning(kinds.MatMul)
def _matmul(kind: kinds.MatMul, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    scale = kind.scale
    return torch.matmul if scale == 1 else lambda a, b: torch.matmul(a, b).mul_(scale)


@FAMILY.lowering(kinds.MatMul, dtypes=FLOAT32)
def _lower_matmul(call: Call) -> Kernel | None:
    if len(call.out.shape) > 4:
        return None
    return matmul(call.kind, call.inputs[0], call.inputs[1], call.out)


def matmul(kind: kinds.MatMul, a: View, b: View, out: View) -> Kernel:
    """Bind a product of a [*batch, M, K] and b [*batch, K, N], of any strides.

    The columns of out [*batch, M, N] are side by side. More than two batch dims must fold to two in every view.
    """
    assert out.shape[-1] == 1 or out.strides[-1] == 1, "columns of the result are not side by side"
    if len(out.shape) > 4:
        lead = len(out.shape) - 2
        batches = loops.folded([view.reshaped(view.shape[:lead], view.strides[:lead]) for view in (a, b, out)])
        a, b, out = (
            view.reshaped((*batch.shape, *view.shape[lead:]), (*batch.strides, *view.strides[lead:]))
            for view, batch in zip((a, b, out), batches, strict=True)
        )
    arguments = {"a": _to_four(a), "b": _to_four(b), "out": _to_four(out), "scale": kind.scale}
    return Kernel(load(), "matmul", arguments)


def _to_four(view: View) -> View:
    """Return the view with ones before its dimensions, four in all."""
    missing = 4 - len(view.shape)
    assert missing >= 0, "batch dims that do not fold to two"
    return view.reshaped((*[1] * missing, *view.shape), (*[0] * missing, *view.strides))


@FAMILY.meaning(kinds.Attention)
def _attention(kind: kinds.Attention, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind.is_causal, scale=kind.scale)

    def attend_by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * kind.scale
        return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)

    return attend if kind.has_zero_rows else attend_by_softmax


@FAMILY.lowering(kinds.Attention, dtypes=FLOAT32)
def _lower_attention(call: Call) -> Kernel:
    q, k, v, *mask = call.inputs
    return attention(call.kind, q, k, v, call.out, mask=mask[0] if mask else None)


def attention(
    kind: kinds.Attention,
    q: View,
    k: View,
    v: View,
    out: View,
    *,
    mask: View | None = None,
) -> Kernel:
    """Bind attention: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E], out [B, H, L, E].

    Features are side by side in k, v and out. ``mask`` is float32, of any strides, and broadcasts to [B, H, L, S].
    """
    assert all(view.shape[-1] == 1 or view.strides[-1] == 1 for view in (k, v, out))
    wanted = (*q.shape[:3], k.shape[2])
    masked = None if mask is None else loops.broadcast(mask, wanted)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "mask": masked,
        "out": out,
        "scale": kind.scale,
        "is_causal": kind.is_causal,
        "has_zero_rows": kind.has_zero_rows,
    }
    return Kernel(load(), "attention", arguments)


@FAMILY.meaning(kinds.Gemm)
def _gemm(kind: kinds.Gemm, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def multiply(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        y = a @ b
        return y + bias[0] if bias else y

    mask = 2 + kind.has_bias
    run = with_epilogue(kind.epilogue, multiply)
    if not kind.has_mask:
        return run
    return lambda *inputs: run(*inputs[:mask], *inputs[mask + 1 :]).masked_fill(inputs[mask] <= 0, 0.0)


@FAMILY.meaning(kinds.WeightGradient)
def _weight_gradient(kind: kinds.WeightGradient, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(dy: Tensor, x: Tensor) -> Any:
        rows = dy.reshape(-1, dy.shape[-1])
        weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return (weight, rows.sum(0)) if kind.has_bias else weight

    return run
