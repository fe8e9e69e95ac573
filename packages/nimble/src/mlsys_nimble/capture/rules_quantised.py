"""Operators of PT2E's quantised graphs, as steps in float32.

PT2E keeps products in floats between ``dequantize`` and ``quantize``. The pair rounds activations to whole numbers and
back; where it stands together, the whole numbers are never stored: floats hold them exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.program import ValueType


@rule("quantized_decomposed.quantize_per_tensor.default")
def _quantise(
    b: Builder, result: ValueType, x: Ref, scale: float, zero_point: int, least: int, most: int, dtype: torch.dtype
) -> Any:
    b.is_quantised = True
    scaled = b.pointwise("mul", b.cast(x, "float32"), 1.0 / scale)
    return _codes(b, result, scaled, float(zero_point), least, most)


@rule("quantized_decomposed.quantize_per_tensor.tensor")
def _quantise_by_tensors(
    b: Builder, result: ValueType, x: Ref, scale: Ref, zero_point: Ref, least: int, most: int, dtype: torch.dtype
) -> Any:
    b.is_quantised = True
    reciprocal = b.cast(b.pointwise("reciprocal", scale), "float32")  # in the dtype of the scale, as torch
    scaled = b.pointwise("mul", b.cast(x, "float32"), reciprocal)
    return _codes(b, result, scaled, b.cast(zero_point, "float32"), least, most)


@rule("quantized_decomposed.choose_qparams", "aten._int_mm")
def _told(b: Builder, result: Any, *args: Any, **kwargs: Any) -> Any:
    b.is_quantised = True
    return NotImplemented  # torch runs it


def _codes(b: Builder, result: ValueType, scaled: Ref, zero_point: Ref | float, least: int, most: int) -> Ref:
    moved = b.pointwise("add", b.pointwise("round", scaled), zero_point)
    codes = b.pointwise("clamp", moved, float(least), float(most))
    made = b.cast(codes, result.dtype)
    b.codes[made.value] = codes
    return made


@rule("quantized_decomposed.dequantize_per_tensor")
def _dequantise(
    b: Builder,
    result: ValueType,
    x: Ref,
    scale: float | Ref,
    zero_point: int | Ref,
    least: int,
    most: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if result.dtype != "float32":
        return NotImplemented
    b.is_quantised = True
    offset = b.cast(zero_point, "float32") if isinstance(zero_point, Ref) else float(zero_point)
    factor = b.cast(scale, "float32") if isinstance(scale, Ref) else float(scale)
    codes = b.codes.get(x.value) or b.cast(x, "float32")
    return b.pointwise("mul", b.pointwise("sub", codes, offset), factor)
