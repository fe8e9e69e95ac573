"""Scaled dot product attention."""

from __future__ import annotations

import math
from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Attention
from mlsys_nimble.ir.program import ValueType

_FLOATS = ("float32", "float64", "float16", "bfloat16")


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
    if dropout or result.numel == 0 or result.dtype not in _FLOATS or k.shape[-2] == 0 or min(q.rank, k.rank) < 3:
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
