"""Gradients of elementwise operators (elementwise too), and of selects and slices (padded with zeros)."""

from __future__ import annotations

import math
from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Pad, Pointwise, Step
from mlsys_nimble.ir.program import ValueType

_FLOATS = ("float32", "float64")  # the half-width ones are computed in single precision by torch


def _steps(b: Builder, result: ValueType, inputs: list[Ref], *steps: Step) -> Any:
    same = all(ref.shape == result.shape for ref in inputs)
    if result.dtype not in _FLOATS or not same or any(ref.dtype not in (result.dtype, "bool") for ref in inputs):
        return NotImplemented
    return b.emit(Pointwise(steps, result.dtype), inputs, result)


@rule("aten.threshold_backward.default")
def _threshold(b: Builder, result: ValueType, dy: Ref, x: Ref, threshold: float) -> Any:
    return _steps(b, result, [dy, x], Step("le", (1, float(threshold))), Step("where", (-1, 0.0, 0)))


@rule("aten.native_dropout_backward.default")
def _dropout(b: Builder, result: ValueType, dy: Ref, mask: Ref, scale: float) -> Any:
    return _steps(b, result, [dy, mask], Step("mul", (0, 1)), Step("mul", (-1, float(scale))))


@rule("aten.sigmoid_backward.default")
def _sigmoid(b: Builder, result: ValueType, dy: Ref, y: Ref) -> Any:
    return _steps(b, result, [dy, y], Step("sub", (1.0, 1)), Step("mul", (-1, 1)), Step("mul", (-2, 0)))


@rule("aten.tanh_backward.default")
def _tanh(b: Builder, result: ValueType, dy: Ref, y: Ref) -> Any:
    return _steps(b, result, [dy, y], Step("square", (1,)), Step("sub", (1.0, -1)), Step("mul", (-2, 0)))


@rule("aten.silu_backward.default")
def _silu(b: Builder, result: ValueType, dy: Ref, x: Ref) -> Any:
    return _steps(
        b,
        result,
        [dy, x],
        Step("sigmoid", (1,)),  # -1: s
        Step("sub", (1.0, -1)),
        Step("mul", (-2, 1)),
        Step("add", (-3, 1.0)),  # 1 + x (1 - s)
        Step("mul", (-4, -1)),
        Step("mul", (-5, 0)),
    )


@rule("aten.hardtanh_backward.default")
def _hardtanh(b: Builder, result: ValueType, dy: Ref, x: Ref, low: float, high: float) -> Any:
    inside = (Step("le", (1, float(low))), Step("ge", (1, float(high))), Step("logical_or", (-1, -2)))
    return _steps(b, result, [dy, x], *inside, Step("where", (-3, 0.0, 0)))


@rule("aten.gelu_backward.default")
def _gelu(b: Builder, result: ValueType, dy: Ref, x: Ref, *, approximate: str = "none") -> Any:
    if approximate != "none":
        return NotImplemented
    return _steps(
        b,
        result,
        [dy, x],
        Step("mul", (1, math.sqrt(0.5))),
        Step("erf", (-1,)),
        Step("add", (-2, 1.0)),
        Step("mul", (-3, 0.5)),  # -4: cumulative distribution of the normal at x
        Step("square", (1,)),
        Step("mul", (-5, -0.5)),
        Step("exp", (-6,)),
        Step("mul", (-7, 1.0 / math.sqrt(2.0 * math.pi))),  # -8: its density
        Step("mul", (-8, 1)),
        Step("add", (-4, -9)),
        Step("mul", (-10, 0)),
    )


def _within(b: Builder, result: ValueType, part: Ref, dim: int, start: int) -> Any:
    after = result.shape[dim] - start - part.shape[dim]
    amounts = tuple((start, after) if d == dim else (0, 0) for d in range(len(result.shape)))
    return b.emit(Pad(amounts), [part], result)


@rule("aten.select_backward.default")
def _select(b: Builder, result: ValueType, dy: Ref, sizes: list[int], dim: int, index: int) -> Any:
    dim %= len(result.shape)
    part = b.reshape(dy, (*result.shape[:dim], 1, *result.shape[dim + 1 :]))
    return _within(b, result, part, dim, index % result.shape[dim])


@rule("aten.slice_backward.default")
def _slice(b: Builder, result: ValueType, dy: Ref, sizes: list[int], dim: int, start: int, end: int, step: int) -> Any:
    dim %= len(result.shape)
    size = result.shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    return _within(b, result, dy, dim, start) if step == 1 else NotImplemented
