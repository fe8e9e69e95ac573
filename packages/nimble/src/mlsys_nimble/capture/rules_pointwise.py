"""Elementwise operators, as steps of a Pointwise; copies and casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlsys_nimble.capture.builder import FLOATS, Builder, Ref, dtype_name
from mlsys_nimble.capture.rules import Rule, rule
from mlsys_nimble.ir.operators import Copy, Pointwise, Step
from mlsys_nimble.ir.program import ValueType

WIDE_FLOATS = ("float32", "float64")  # torch rounds the others once, after several steps
Operand = Ref | int | float | bool

_FLOAT_UNARY = (
    *("exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "sin", "cos"),
    *("silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "relu6"),
)
_ANY_UNARY = ("abs", "neg", "relu", "square")
_RESOLVE = ("aten.resolve_conj", "aten.resolve_neg")  # values of a program carry no bits
_ROUNDING = ("floor", "ceil", "trunc")
_BINARY = ("mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or")


def compute_dtype(result: ValueType, operands: tuple[Operand, ...]) -> str:
    """Return the dtype that torch computes in: the result's or, where that is bool, the operands' promoted dtype."""
    if result.dtype != "bool":
        return result.dtype
    metas = [
        torch.empty((1,) * ref.rank, dtype=getattr(torch, ref.dtype), device="meta") if isinstance(ref, Ref) else ref
        for ref in operands
    ]
    return dtype_name(torch.result_type(metas[0], metas[-1]))


def elementwise(b: Builder, result: ValueType, op: str, *operands: Operand) -> Any:
    """Emit one step over tensors and numbers, promoted as torch does."""
    made = b.pointwise(op, *operands, dtype=compute_dtype(result, operands), result=result.dtype)
    return b.expand(made, result.shape)


def _unary(op: str, *, floats_only: bool) -> Rule:
    def unary(b: Builder, result: ValueType, x: Ref) -> Any:
        if floats_only and result.dtype not in FLOATS:
            return NotImplemented
        return elementwise(b, result, op, x)

    return unary


def _binary(op: str) -> Rule:
    return lambda b, result, x, y: elementwise(b, result, op, x, y)


def _rounding(op: str) -> Rule:
    return lambda b, result, x: elementwise(b, result, op, x) if x.dtype in FLOATS else x


for _name in _FLOAT_UNARY:
    rule(f"aten.{_name}")(_unary(_name, floats_only=True))
for _name in _ANY_UNARY:
    rule(f"aten.{_name}")(_unary(_name, floats_only=False))
for _name in _ROUNDING:
    rule(f"aten.{_name}")(_rounding(_name))
for _name in _BINARY:
    rule(f"aten.{_name}")(_binary(_name))


def _sum(op: str) -> Rule:
    def add(b: Builder, result: ValueType, x: Operand, y: Operand, alpha: float = 1) -> Any:
        scaled: Operand = y
        if alpha != 1:
            if result.dtype in FLOATS and result.dtype not in WIDE_FLOATS:
                return NotImplemented
            scaled = b.pointwise("mul", y, alpha, dtype=result.dtype) if isinstance(y, Ref) else y * alpha
        return elementwise(b, result, op, x, scaled)

    return add


rule("aten.add")(_sum("add"))
rule("aten.sub")(_sum("sub"))
rule("aten.rsub")(lambda b, result, x, y, alpha=1: _sum("sub")(b, result, y, x, alpha))


@rule("aten.div")
def _div(b: Builder, result: ValueType, x: Operand, y: Operand, rounding_mode: str | None = None) -> Any:
    return NotImplemented if rounding_mode else elementwise(b, result, "div", x, y)


def _added(op: str) -> Rule:
    """Return a rule for x + value * op(y, z)."""

    def add(b: Builder, result: ValueType, x: Ref, y: Ref, z: Ref, *, value: float = 1) -> Any:
        if result.dtype not in WIDE_FLOATS:
            return NotImplemented
        term = b.pointwise(op, y, z, dtype=result.dtype)
        return _sum("add")(b, result, x, term, value)

    return add


rule("aten.addcmul")(_added("mul"))
rule("aten.addcdiv")(_added("div"))


@rule("aten.pow")
def _pow(b: Builder, result: ValueType, x: Operand, y: Operand) -> Any:
    if result.dtype not in FLOATS:
        return NotImplemented
    short = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if not isinstance(y, Ref) and y in short:
        return elementwise(b, result, short[y], x)
    return elementwise(b, result, "pow", x, y)


@rule("aten.logical_not", "aten.bitwise_not")
def _not(b: Builder, result: ValueType, x: Ref) -> Any:
    return elementwise(b, result, "logical_not", x) if x.dtype == result.dtype == "bool" else NotImplemented


@rule("aten.bitwise_and", "aten.__and__")
def _and(b: Builder, result: ValueType, x: Operand, y: Operand) -> Any:
    return elementwise(b, result, "logical_and", x, y) if result.dtype == "bool" else NotImplemented


@rule("aten.bitwise_or", "aten.__or__")
def _or(b: Builder, result: ValueType, x: Operand, y: Operand) -> Any:
    return elementwise(b, result, "logical_or", x, y) if result.dtype == "bool" else NotImplemented


@rule("aten.sign")
def _sign(b: Builder, result: ValueType, x: Ref) -> Any:
    return elementwise(b, result, "sign", x) if result.dtype in FLOATS else NotImplemented


@rule("aten.round.default")
def _round(b: Builder, result: ValueType, x: Ref) -> Any:
    return elementwise(b, result, "round", x) if x.dtype in FLOATS else x


@rule("aten.gelu")
def _gelu(b: Builder, result: ValueType, x: Ref, approximate: str = "none") -> Any:
    return elementwise(b, result, "gelu" if approximate == "none" else "gelu_tanh", x)


@rule("aten.leaky_relu")
def _leaky_relu(b: Builder, result: ValueType, x: Ref, slope: float = 0.01) -> Any:
    return elementwise(b, result, "leaky_relu", x, slope)


@rule("aten.elu")
def _elu(b: Builder, result: ValueType, x: Ref, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if input_scale != 1:
        return NotImplemented
    y = elementwise(b, result, "elu", x, alpha)
    return y if scale == 1 else elementwise(b, result, "mul", y, scale)


@rule("aten.prelu")
def _prelu(b: Builder, result: ValueType, x: Ref, weight: Ref) -> Any:
    if weight.type.numel > 1 and x.rank > 1:
        weight = b.reshape(weight, (weight.type.numel,) + (1,) * (x.rank - 2))
    else:
        weight = b.reshape(weight, (weight.type.numel,))
    steps = (Step("mul", (0, 1)), Step("gt", (0, 0.0)), Step("where", (-2, 0, -1)))
    return b.emit(Pointwise(steps, result.dtype), [x, weight], result) if x.rank else NotImplemented


@rule("aten.glu")
def _glu(b: Builder, result: ValueType, x: Ref, dim: int = -1) -> Any:
    dim %= x.rank
    half = x.shape[dim] // 2
    gate = b.pointwise("sigmoid", b.slice(x, dim, half, half))
    return elementwise(b, result, "mul", b.slice(x, dim, 0, half), gate)


def _clamp(b: Builder, result: ValueType, x: Ref, low: Operand | None = None, high: Operand | None = None) -> Any:
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return NotImplemented
    both = low is not None and high is not None
    if both and not isinstance(low, Ref) and not isinstance(high, Ref):
        if (low, high) == (0, 6) and result.dtype in FLOATS:
            return elementwise(b, result, "relu6", x)
        return elementwise(b, result, "clamp", x, low, high)  # type: ignore[arg-type]
    y: Any = x
    if low is not None:
        y = elementwise(b, result, "maximum", y, low)
    return y if high is None else elementwise(b, result, "minimum", y, high)


rule("aten.clamp")(lambda b, result, x, min=None, max=None: _clamp(b, result, x, min, max))  # noqa: A006
rule("aten.clamp_min")(lambda b, result, x, low: _clamp(b, result, x, low, None))
rule("aten.clamp_max")(lambda b, result, x, high: _clamp(b, result, x, None, high))
rule("aten.hardtanh")(lambda b, result, x, low=-1, high=1: _clamp(b, result, x, low, high))


@rule("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(b: Builder, result: ValueType, condition: Ref, x: Operand, y: Operand) -> Any:
    made = b.pointwise("where", condition, x, y, dtype=result.dtype, result=result.dtype)
    return b.expand(made, result.shape)


@rule("aten.masked_fill")
def _masked_fill(b: Builder, result: ValueType, x: Ref, mask: Ref, value: Operand) -> Any:
    return _where(b, result, mask, value, x)


@rule("aten.threshold")
def _threshold(b: Builder, result: ValueType, x: Ref, threshold: float, value: float) -> Any:
    if result.dtype not in FLOATS:
        return NotImplemented
    steps = (Step("le", (0, float(threshold))), Step("where", (-1, float(value), 0)))
    return b.emit(Pointwise(steps, result.dtype), [x], result)


@rule("aten.lerp.Scalar")
def _lerp(b: Builder, result: ValueType, start: Ref, end: Ref, weight: float) -> Any:
    if isinstance(weight, complex) or result.dtype not in WIDE_FLOATS:
        return NotImplemented
    steps = (Step("sub", (1, 0)), Step("mul", (-1, float(weight))), Step("add", (0, -2)))
    return b.emit(Pointwise(steps, result.dtype), [start, end], result) if abs(weight) < 0.5 else NotImplemented


@rule("aten.clone")
def _clone(b: Builder, result: ValueType, x: Ref, memory_format: Any = None) -> Ref:
    return b.emit(Copy(), [x], result)


@rule("aten._to_copy", "aten.to", "aten.type_as", "aten.contiguous")
def _to(b: Builder, result: ValueType, x: Ref, *args: Any, copy: bool = False, **kwargs: Any) -> Ref:
    return b.cast(x, result.dtype)


@rule("aten.copy")
def _copy(b: Builder, result: ValueType, x: Ref, source: Ref, non_blocking: bool = False) -> Ref:
    return b.expand(b.cast(source, result.dtype), result.shape)


@rule("aten.alias", "aten.detach", "aten.lift_fresh", "aten.lift", "aten.lift_fresh_copy", *_RESOLVE)
def _alias(b: Builder, result: ValueType, x: Ref) -> Ref:
    return x


@rule("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout", "aten.native_dropout")
def _dropout(b: Builder, result: Any, x: Ref, p: float, train: bool | None) -> Any:
    return x if not train and isinstance(result, ValueType) else NotImplemented
