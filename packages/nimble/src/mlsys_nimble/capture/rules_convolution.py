"""Convolutions; torch runs the transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Convolution
from mlsys_nimble.ir.program import ValueType


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def _conv(
    b: Builder,
    result: ValueType,
    x: Ref,
    weight: Ref,
    bias: Ref | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    num_dims = weight.rank - 2
    stride, dilation = spread(stride, num_dims), spread(dilation, num_dims)
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        pairs = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pairs = tuple((amount, amount) for amount in spread(padding, num_dims))
    if 0 in x.shape or 0 in result.shape or x.dtype.startswith("complex"):
        return NotImplemented
    batched = x.rank == weight.rank
    inputs = [x if batched else b.reshape(x, (1, *x.shape)), weight, *([bias] if bias else [])]
    shape = result.shape if batched else (1, *result.shape)
    kind = Convolution(stride, pairs, dilation, groups, has_bias=bias is not None)
    return b.reshape(b.emit(kind, inputs, ValueType(shape, result.dtype)), result.shape)


@rule("aten.convolution")
def _convolution(
    b: Builder,
    result: ValueType,
    x: Ref,
    weight: Ref,
    bias: Ref | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed:
        return NotImplemented
    return _conv(b, result, x, weight, bias, stride, padding, dilation, groups)


def spread(amount: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """Return one number for each dimension of space, from one for all or one for each."""
    amounts = (amount,) if isinstance(amount, int) else tuple(amount)
    return amounts * num_dims if len(amounts) == 1 else amounts
