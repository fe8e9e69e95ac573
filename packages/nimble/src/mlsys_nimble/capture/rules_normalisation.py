"""Reductions and normalisations. Batch norm of inference is a constant scale and shift: both fold into convolutions."""

from __future__ import annotations

from math import prod
from typing import Any

from mlsys_nimble.capture.builder import FLOATS, Builder, Ref
from mlsys_nimble.capture.rules import Rule, rule
from mlsys_nimble.ir.operators import LayerNorm, Pointwise, Reduce, Softmax, Step
from mlsys_nimble.ir.program import ValueType


@rule("aten.batch_norm")
def _batch_norm(
    b: Builder,
    result: ValueType,
    x: Ref,
    weight: Ref | None,
    bias: Ref | None,
    mean: Ref | None,
    var: Ref | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if training or mean is None or var is None or x.dtype != mean.dtype:
        return NotImplemented
    scale = b.pointwise("rsqrt", b.pointwise("add", var, eps))
    scale = scale if weight is None else b.pointwise("mul", scale, weight)
    shift = b.pointwise("mul", mean, scale)
    shift = b.pointwise("neg", shift) if bias is None else b.pointwise("sub", bias, shift)
    return affine(b, x, scale, shift)


def affine(b: Builder, x: Ref, scale: Ref | None, shift: Ref | None) -> Ref:
    """Multiply x [N, C, *] by scale [C] and add shift [C], in one operator."""
    column = (x.shape[1],) + (1,) * (x.rank - 2)
    steps: list[Step] = []
    inputs = [x]
    for op, amount in (("mul", scale), ("add", shift)):
        if amount is not None:
            steps.append(Step(op, (-len(steps) if steps else 0, len(inputs))))
            inputs.append(b.reshape(amount, column))
    return b.emit(Pointwise(tuple(steps), x.dtype), inputs, x.type) if steps else x


@rule("aten.layer_norm")
def _layer_norm(
    b: Builder,
    result: ValueType,
    x: Ref,
    shape: list[int],
    weight: Ref | None = None,
    bias: Ref | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    if result.dtype not in FLOATS or any(ref is not None and ref.dtype != x.dtype for ref in (weight, bias)):
        return NotImplemented
    kind = LayerNorm(len(shape), eps, has_weight=weight is not None, has_bias=bias is not None)
    return b.emit(kind, [ref for ref in (x, weight, bias) if ref is not None], result)


@rule("aten.group_norm")
def _group_norm(
    b: Builder,
    result: ValueType,
    x: Ref,
    groups: int,
    weight: Ref | None = None,
    bias: Ref | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    if x.type.numel == 0 or any(ref is not None and ref.dtype != x.dtype for ref in (weight, bias)):
        return NotImplemented
    rows = b.reshape(x, (x.shape[0], groups, prod(x.shape[1:]) // groups))
    normal = b.emit(LayerNorm(1, eps, has_weight=False, has_bias=False), [rows], rows.type)
    return affine(b, b.reshape(normal, x.shape), weight, bias)


@rule("aten.instance_norm")
def _instance_norm(
    b: Builder,
    result: ValueType,
    x: Ref,
    weight: Ref | None,
    bias: Ref | None,
    mean: Ref | None,
    var: Ref | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if not use_input_stats:
        return _batch_norm(b, result, x, weight, bias, mean, var, False, momentum, eps, cudnn)
    if mean is not None:  # the running statistics would be updated
        return NotImplemented
    return _group_norm(b, result, x, x.shape[1], weight, bias, eps)


@rule("aten.softmax.int", "aten._softmax")
def _softmax(b: Builder, result: ValueType, x: Ref, dim: int, dtype: Any = None) -> Any:
    return _soft(b, result, x, dim, is_log=False)


@rule("aten.log_softmax.int", "aten._log_softmax")
def _log_softmax(b: Builder, result: ValueType, x: Ref, dim: int, dtype: Any = None) -> Any:
    return _soft(b, result, x, dim, is_log=True)


def _soft(b: Builder, result: ValueType, x: Ref, dim: int, *, is_log: bool) -> Any:
    if x.rank == 0 or result.dtype not in FLOATS:
        return NotImplemented
    return b.emit(Softmax(dim % x.rank, is_log), [b.cast(x, result.dtype)], result)


def reduce(b: Builder, result: ValueType, op: Any, x: Ref, dims: Any = None, keeps_dims: bool = False) -> Any:
    """Emit one reduction in the result's dtype, over all dimensions where ``dims`` names none."""
    if isinstance(dims, int):
        dims = (dims,)
    chosen = tuple(sorted({dim % x.rank for dim in dims} if dims else range(x.rank))) if x.rank else ()
    if x.type.numel == 0 or x.dtype.startswith("complex") or not chosen:
        return NotImplemented
    return b.emit(Reduce(op, chosen, keeps_dims), [b.cast(x, result.dtype)], result)


def _with_dtype(op: str) -> Rule:
    return lambda b, result, x, dims=None, keepdim=False, dtype=None: reduce(b, result, op, x, dims, keepdim)


def _without_dtype(op: str) -> Rule:
    return lambda b, result, x, dims=None, keepdim=False: reduce(b, result, op, x, dims, keepdim)


rule("aten.sum.default", "aten.sum.dim_IntList")(_with_dtype("sum"))
rule("aten.mean.default", "aten.mean.dim")(_with_dtype("mean"))
rule("aten.amax", "aten.max.default")(_without_dtype("max"))
rule("aten.amin", "aten.min.default")(_without_dtype("min"))


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def _vector_norm(
    b: Builder, result: ValueType, x: Ref, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order not in (None, 2) or x.dtype != result.dtype:
        return NotImplemented
    is_short = x.dtype in ("float16", "bfloat16")  # squares may overflow: torch sums in float32
    wide = ValueType(result.shape, "float32") if is_short else result
    total = reduce(b, wide, "sum", b.pointwise("square", b.cast(x, wide.dtype)), dims, keepdim)
    return b.cast(b.pointwise("sqrt", total), result.dtype) if total is not NotImplemented else NotImplemented
