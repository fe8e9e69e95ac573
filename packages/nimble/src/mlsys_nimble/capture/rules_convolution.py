"""Convolutions, of which torch runs the transposed ones, and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_nimble.capture.builder import FLOATS, Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Convolution, Pool, Reduce
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


def _windows(x: Ref, result: ValueType, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """Return kernel, stride, padding and dilation for each dimension of space; pad the end as far as windows reach."""
    num_dims = len(kernel)
    stride = spread(stride, num_dims) if stride else kernel
    padding, dilation = spread(padding, num_dims), spread(dilation, num_dims)
    pairs = []
    for index in range(num_dims):
        size, count = x.shape[index - num_dims], result.shape[index - num_dims]
        reach = (count - 1) * stride[index] + dilation[index] * (kernel[index] - 1) + 1
        pairs.append((padding[index], max(padding[index], reach - size - padding[index])))
    return kernel, stride, tuple(pairs), dilation


def _pool(b: Builder, result: ValueType, x: Ref, kind: Pool) -> Any:
    num_dims = len(kind.kernel)
    if x.type.numel == 0 or result.numel == 0 or result.dtype not in FLOATS:
        return NotImplemented
    if num_dims == 3 and kind.op == "average" and result.dtype in ("float16", "bfloat16"):  # torch has none on a CPU
        return NotImplemented
    batched = x.rank == num_dims + 2
    y = x if batched else b.reshape(x, (1, *x.shape))
    y = b.emit(kind, [y], result if batched else ValueType((1, *result.shape), result.dtype))
    return b.reshape(y, result.shape)


def _max_pool(num_dims: int) -> Any:
    def max_pool(
        b: Builder,
        result: ValueType,
        x: Ref,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        windows = _windows(x, result, spread(kernel, num_dims), stride, padding, dilation)
        return _pool(b, result, x, Pool("max", *windows))

    return max_pool


def _avg_pool(num_dims: int) -> Any:
    def avg_pool(
        b: Builder,
        result: ValueType,
        x: Ref,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        counts_padding: bool = True,
        divisor: int | None = None,
    ) -> Any:
        kernel, stride, pairs, dilation = _windows(x, result, spread(kernel, num_dims), stride, padding, 1)
        reaches_past = any(after > before for before, after in pairs)
        if divisor is not None or (reaches_past and counts_padding):  # torch does not count what lies past the padding
            return NotImplemented
        return _pool(b, result, x, Pool("average", kernel, stride, pairs, dilation, counts_padding))

    return avg_pool


def _adaptive(op: Any, num_dims: int) -> Any:
    def adaptive(b: Builder, result: ValueType, x: Ref, size: Any) -> Any:
        sizes, space = result.shape[-num_dims:], x.shape[-num_dims:]
        if x.type.numel == 0 or result.numel == 0 or any(n % m for n, m in zip(space, sizes, strict=True)):
            return NotImplemented
        if sizes == (1,) * num_dims and op == "average":
            dims = tuple(range(x.rank - num_dims, x.rank))
            return b.emit(Reduce("mean", dims, keeps_dims=True), [x], result)
        kernel = tuple(n // m for n, m in zip(space, sizes, strict=True))
        return _pool(b, result, x, Pool(op, kernel, kernel, ((0, 0),) * num_dims, (1,) * num_dims))

    return adaptive


for _n in (1, 2, 3):
    rule(f"aten.max_pool{_n}d")(_max_pool(_n))
    rule(f"aten.avg_pool{_n}d")(_avg_pool(_n))
    rule(f"aten.adaptive_avg_pool{_n}d")(_adaptive("average", _n))
