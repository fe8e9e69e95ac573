"""Codes of quantised graphs; ``cpu/integers.py`` binds their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mlsys_nimble.backends.cpu import integers
from mlsys_nimble.backends.cpu.library import SPACE, Kernel
from mlsys_nimble.backends.operators.convolution import pixels
from mlsys_nimble.backends.table import Call, Family, Run, dtype_of, find, weights_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

FAMILY = Family()
_CODES = frozenset({"uint8", "float32"})


def _numbers(codes: kinds.Codes, parameters: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """Return scale and zero point, numbers or tensors."""
    return (parameters[0][0], parameters[0][1]) if parameters else (codes.scale, codes.zero_point)


def _to_codes(codes: kinds.Codes, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
    scale, zero_point = _numbers(codes, parameters)
    inverse = (1.0 / scale.double()).float() if parameters else 1.0 / scale
    return torch.clamp(torch.round(x * inverse) + zero_point, codes.least, codes.most).to(dtype)


def _to_floats(codes: kinds.Codes, x: Tensor, *parameters: Tensor) -> Tensor:
    scale, zero_point = _numbers(codes, parameters)
    made: Tensor = (x.float() - zero_point) * scale
    return made


@FAMILY.meaning(kinds.Quantise)
def _quantise(kind: kinds.Quantise, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    dtype = dtype_of(result)
    return lambda x, *parameters: _to_codes(kind.codes, dtype, x, *parameters)


@FAMILY.meaning(kinds.Dequantise)
def _dequantise(kind: kinds.Dequantise, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x, *parameters: _to_floats(kind.codes, x, *parameters)


@FAMILY.lowering(kinds.Quantise, kinds.Dequantise, dtypes=_CODES)
def _lower_coding(call: Call) -> Kernel:
    parameters = call.inputs[1] if call.kind.is_dynamic else None
    return integers.coding(call.kind.codes, call.inputs[0], call.out, parameters=parameters)


@FAMILY.meaning(kinds.ChooseScale)
def _choose_scale(kind: kinds.ChooseScale, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(x: Tensor) -> Tensor:
        least, most = x.amin().clamp(max=0.0), x.amax().clamp(min=0.0)
        scale = torch.clamp((most - least) / float(kind.most - kind.least), min=kind.eps)
        zero_point = torch.clamp(kind.least - torch.round(least / scale), kind.least, kind.most)
        return torch.stack([scale, zero_point])

    return run


@FAMILY.lowering(kinds.ChooseScale, dtypes=frozenset({"float32"}))
def _lower_choose_scale(call: Call) -> Kernel | None:
    return integers.choose_scale(call.kind, call.inputs[0], call.out)


@FAMILY.meaning(kinds.IntegerProduct)
def _product(kind: kinds.IntegerProduct, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    meaning = find(type(kind.main)).meaning
    assert meaning is not None
    run = meaning(kind.main, inputs, result)

    def multiply(x: Tensor, weight: Tensor, scales: Tensor, *rest: Tensor) -> Tensor:
        bias, rest = rest[: kind.main.has_bias], rest[kind.main.has_bias :]
        parameters, rest = rest[: kind.is_dynamic], rest[kind.is_dynamic :]
        if rest and kind.residual:
            rest = (_to_floats(kind.residual, rest[0]),)
        wide = weight.float() * scales.reshape(-1, *(1,) * (weight.dim() - 1))
        y: Tensor = run(_to_floats(kind.x, x, *parameters), wide, *bias, *rest)
        return y if kind.result is None else _to_codes(kind.result, torch.uint8, y)

    return multiply


@FAMILY.lowering(kinds.IntegerProduct, packs=weights_of)
def _lower_product(call: Call) -> Kernel | None:
    kind: kinds.IntegerProduct = call.kind
    weight, scales = call.weights[1], call.weights[2]
    bias = call.weights[3] if kind.main.has_bias else None
    if weight is None or scales is None or (kind.main.has_bias and bias is None) or len(call.out.shape) > SPACE + 2:
        return None
    x, out = call.inputs[0], call.out
    residual = call.inputs[-1] if kind.epilogue.has_residual else None
    parameters = call.inputs[3 + kind.main.has_bias] if kind.is_dynamic else None
    if isinstance(kind.main, kinds.Linear):
        x, out = pixels(x), pixels(out)
        residual = None if residual is None else pixels(residual)
        main = kinds.Convolution((1,), ((0, 0),), (1,), 1, kind.main.has_bias, kind.main.epilogue)
        kind, weight = replace(kind, main=main), weight[:, :, None]
    return integers.product(kind, x, weight, scales, bias, out, parameters=parameters, residual=residual)
