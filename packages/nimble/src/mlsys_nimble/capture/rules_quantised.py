"""Operators of PT2E's quantised graphs.

Products of codes are formed by a pass (``passes/integers.py``), which also expands the rounding that stays between
floats.
"""

from __future__ import annotations

from typing import Any

import torch

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import ChooseScale, Codes, Dequantise, Quantise
from mlsys_nimble.ir.program import ValueType

_ANY = 1.0, 0  # scale and zero point where parameters have them


@rule("quantized_decomposed.quantize_per_tensor.default")
def _quantise(
    b: Builder, result: ValueType, x: Ref, scale: float, zero_point: int, least: int, most: int, dtype: torch.dtype
) -> Any:
    return b.emit(Quantise(Codes(scale, zero_point, least, most)), [b.cast(x, "float32")], result)


@rule("quantized_decomposed.dequantize_per_tensor.default")
def _dequantise(
    b: Builder,
    result: ValueType,
    x: Ref,
    scale: float,
    zero_point: int,
    least: int,
    most: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if result.dtype != "float32":
        return NotImplemented
    return b.emit(Dequantise(Codes(scale, zero_point, least, most)), [x], result)


@rule("quantized_decomposed.choose_qparams.tensor")
def _choose(b: Builder, results: list[ValueType], x: Ref, least: int, most: int, eps: float, dtype: torch.dtype) -> Any:
    if x.dtype != "float32" or x.type.numel == 0:
        return NotImplemented
    parameters = b.emit(ChooseScale(least, most, eps), [x], ValueType((2,), "float32"))
    scale, zero_point = (
        b.cast(b.reshape(b.slice(parameters, 0, part, 1), type_.shape), type_.dtype)
        for part, type_ in enumerate(results)
    )
    b.parameters[scale.value, zero_point.value] = parameters
    return [scale, zero_point]


@rule("quantized_decomposed.quantize_per_tensor.tensor")
def _quantise_by_tensors(
    b: Builder, result: ValueType, x: Ref, scale: Ref, zero_point: Ref, least: int, most: int, dtype: torch.dtype
) -> Any:
    parameters = b.parameters.get((scale.value, zero_point.value))
    if parameters is None:
        return NotImplemented
    return b.emit(Quantise(Codes(*_ANY, least, most), is_dynamic=True), [b.cast(x, "float32"), parameters], result)


@rule("quantized_decomposed.dequantize_per_tensor.tensor")
def _dequantise_by_tensors(
    b: Builder,
    result: ValueType,
    x: Ref,
    scale: Ref,
    zero_point: Ref,
    least: int,
    most: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    parameters = b.parameters.get((scale.value, zero_point.value))
    if parameters is None or result.dtype != "float32":
        return NotImplemented
    return b.emit(Dequantise(Codes(*_ANY, least, most), is_dynamic=True), [x, parameters], result)
