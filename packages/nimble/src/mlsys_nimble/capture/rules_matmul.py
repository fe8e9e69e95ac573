"""Matrix products (Linear where one side is a weight, MatMul where both are computed) and attention."""

from __future__ import annotations

import math
from math import prod
from typing import Any

from mlsys_nimble.capture.builder import FLOATS, Builder, Ref, broadcast
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Attention, Embedding, Gather, Linear, MatMul
from mlsys_nimble.ir.program import ValueType


@rule("aten.linear")
def _linear(b: Builder, result: ValueType, x: Ref, weight: Ref, bias: Ref | None = None) -> Any:
    if weight.rank != 2 or result.dtype not in FLOATS:
        return NotImplemented
    return linear(b, x, weight, bias)


def linear(b: Builder, x: Ref, weight: Ref, bias: Ref | None = None) -> Ref:
    """Multiply x [*, K] by weight [O, K]; a computed weight gives a MatMul."""
    shape = (*x.shape[:-1], weight.shape[0])
    if not b.is_fixed(weight):
        y = matmul(b, x, b.permute(weight, (1, 0)))
        return y if bias is None else b.pointwise("add", y, bias)
    if bias is not None and (bias.rank != 1 or not b.is_fixed(bias)):
        y = linear(b, x, weight)
        return b.pointwise("add", y, bias)
    inputs = [x, weight, *([bias] if bias else [])]
    return b.emit(Linear(has_bias=bias is not None), inputs, ValueType(shape, x.dtype))


def matmul(b: Builder, x: Ref, y: Ref) -> Ref:
    """Multiply as torch.matmul does, for floating dtypes."""
    if x.rank == 1:
        z = matmul(b, b.reshape(x, (1, *x.shape)), y)
        return b.reshape(z, z.shape[:-2] + z.shape[-1:]) if y.rank > 1 else b.reshape(z, z.shape[1:])
    if y.rank == 1:
        z = matmul(b, x, b.reshape(y, (*y.shape, 1)))
        return b.reshape(z, z.shape[:-1])
    if y.rank == 2 and b.is_fixed(y):
        return linear(b, x, b.permute(y, (1, 0)))
    if y.rank == 2:
        rows = b.reshape(x, (prod(x.shape[:-1]), x.shape[-1]))
        z = b.emit(MatMul(), [rows, y], ValueType((rows.shape[0], y.shape[1]), x.dtype))
        return b.reshape(z, (*x.shape[:-1], y.shape[1]))
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    x, y = b.expand(x, batch + x.shape[-2:]), b.expand(y, batch + y.shape[-2:])
    return b.emit(MatMul(), [x, y], ValueType((*batch, x.shape[-2], y.shape[-1]), x.dtype))


@rule("aten.matmul", "aten.mm.default", "aten.bmm.default", "aten.mv")
def _matmul(b: Builder, result: ValueType, x: Ref, y: Ref) -> Any:
    return matmul(b, x, y) if result.dtype in FLOATS else NotImplemented


@rule("aten.addmm.default", "aten.baddbmm.default")
def _addmm(b: Builder, result: ValueType, bias: Ref, x: Ref, y: Ref, *, beta: float = 1, alpha: float = 1) -> Any:
    if result.dtype not in FLOATS or alpha != 1 or beta != 1:
        return NotImplemented
    if y.rank == 2 and b.is_fixed(y):
        return linear(b, x, b.permute(y, (1, 0)), bias)
    return b.pointwise("add", matmul(b, x, y), bias)


@rule("aten.embedding")
def _embedding(b: Builder, result: ValueType, table: Ref, indices: Ref, *args: Any) -> Any:
    if table.rank != 2:
        return NotImplemented
    return b.emit(Embedding() if b.is_fixed(table) else Gather(wraps=False), [table, indices], result)


@rule("aten.scaled_dot_product_attention")
def _attention(
    b: Builder,
    result: ValueType,
    q: Ref,
    k: Ref,
    v: Ref,
    mask: Ref | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout or result.numel == 0 or result.dtype not in FLOATS or k.shape[-2] == 0 or min(q.rank, k.rank) < 3:
        return NotImplemented
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (_repeat_heads(b, x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    batch = result.shape[:-2]
    q, k, v = (_as_four(b, x, batch) for x in (q, k, v))
    inputs = [q, k, v]
    if mask is not None:
        if mask.dtype == "bool":
            mask = b.pointwise("where", mask, 0.0, -math.inf, dtype=q.dtype, result=q.dtype)
        if len(batch) != 2:
            mask = _as_four(b, mask, batch)
        inputs.append(mask)
    shape = (*q.shape[:3], v.shape[3])
    y = b.emit(Attention(scale, is_causal, has_mask=mask is not None), inputs, ValueType(shape, result.dtype))
    return b.reshape(y, result.shape)


def _repeat_heads(b: Builder, x: Ref, times: int) -> Ref:
    *batch, heads, length, width = x.shape
    y = b.expand(b.reshape(x, (*batch, heads, 1, length, width)), (*batch, heads, times, length, width))
    return b.reshape(y, (*batch, heads * times, length, width))


def _as_four(b: Builder, x: Ref, batch: tuple[int, ...]) -> Ref:
    """Reshape any batch dimensions to two."""
    x = b.expand(x, (*batch, *x.shape[-2:]))
    return b.reshape(x, (math.prod(batch[:-1]), batch[-1], *x.shape[-2:]))
