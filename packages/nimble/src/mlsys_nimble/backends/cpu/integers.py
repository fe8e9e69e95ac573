"""Kernels of int8 and uint8 values: products (integers.h, integer_depthwise.h), quantisation and maxima (coding.h)."""

from __future__ import annotations

from dataclasses import replace

import torch
from mlsys_nimble.backends.cpu import loops, packing
from mlsys_nimble.backends.cpu.library import Kernel, View, load_int8
from mlsys_nimble.backends.cpu.loops import image, in_space, window
from mlsys_nimble.ir import operators
from torch import Tensor

_CLAMPS = {None: (float("-inf"), float("inf")), "relu": (0.0, float("inf")), "relu6": (0.0, 6.0)}


def product(
    kind: operators.IntegerProduct,
    x: View,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    parameters: View | None = None,
    residual: View | None = None,
) -> Kernel:
    """Bind a convolution of quantised values; a linear is one over pixels of one line.

    Shapes: x [N, C, *space], weight int8 [O, C/groups, *kernel], scales and bias [O], residual and out [N, O, *space'].
    Channels of ``out`` and ``residual`` are side by side; those of ``x`` too where there are groups.
    """
    main = kind.main
    assert isinstance(main, operators.Convolution)
    library = load_int8()
    lanes, words = library.kernel_lanes(), library.constants["DOT_WORDS"]
    factor = 1.0 if kind.is_dynamic else kind.x.scale
    shift = torch.zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.detach()
    codes, unit = _codes(kind)
    values = [scales.detach().double() * factor * unit, shift.double() * unit]
    columns = [*(each.float() for each in values), weight.detach().flatten(1).sum(1, dtype=torch.int32)]
    is_depthwise = is_channelwise(main, weight)
    if is_depthwise:
        planes = weight.detach().reshape(weight.shape[0], 1, *in_space(weight.shape[2:], 1)[1:])
        packed = packing.pack_integer_depthwise(planes, lanes, words)
        kept = [packing.pack_quads(each, lanes) for each in columns]
    else:
        run = weight.shape[1] * (weight.shape[-1] if main.dilation[-1] == 1 else 1)  # side by side in x
        packed = packing.pack_integers(weight, main.groups, lanes, words, run)
        kept = [packing.pack_values(each, main.groups, lanes) for each in columns]
    arguments = {
        "x": image(x),
        "residual": image(residual),
        "out": image(out),
        "parameters": parameters,
        "weights": packed.data_ptr(),
        **{name: each.data_ptr() for name, each in zip(("scales", "bias", "sums"), kept, strict=True)},
        **window(main, weight.shape[2:]),
        "groups": main.groups,
        "zero_point": kind.x.zero_point,
        "codes": codes,
        "epilogue": main.epilogue,
    }
    return Kernel(library, "integer_depthwise" if is_depthwise else "integer_convolution", arguments, packed, *kept)


def _codes(kind: operators.IntegerProduct) -> tuple[dict[str, float], float]:
    """Return how residual and result are quantised, as a kernel reads it, and the factor of scales and biases.

    Where only a clamp follows, it is applied to quantised values; scales and biases are in units of the result's scale.
    """
    epilogue, result, residual = kind.epilogue, kind.result, kind.residual
    if result is None:
        return _record(residual, None, 1.0, 1.0), 1.0
    if epilogue.activation not in _CLAMPS or epilogue.activates_first:
        return _record(residual, result, 1.0, 1.0 / result.scale), 1.0
    unit = 1.0 / result.scale
    low, high = (result.zero_point + round(min(max(bound * unit, -1e6), 1e6)) for bound in _CLAMPS[epilogue.activation])
    most = max(min(result.most, high), result.least)
    clamped = replace(result, least=min(max(result.least, low), most), most=most)
    if epilogue.has_residual and residual is None:
        return _record(None, clamped, 1.0, unit), 1.0
    return _record(residual, clamped, unit, 1.0), unit


def _record(
    residual: operators.Codes | None, result: operators.Codes | None, unit: float, inverse: float
) -> dict[str, float]:
    return {
        "residual_scale": residual.scale * unit if residual else 0.0,
        "residual_zero_point": residual.zero_point if residual else 0,
        "makes_codes": result is not None,
        "inverse": inverse,
        "zero_point": result.zero_point if result else 0,
        "least": result.least if result else 0,
        "most": result.most if result else 0,
    }


def is_channelwise(main: operators.Convolution, weight: Tensor) -> bool:
    """Return whether a convolution has one filter a channel, over a line or a plane."""
    return main.groups == weight.shape[0] and weight.shape[1] == 1 and 3 <= weight.dim() <= 4


def coding(codes: operators.Codes, x: View, out: View, *, parameters: View | None = None) -> Kernel:
    """Bind quantisation or dequantisation, by the dtype of ``out``."""
    source, target = loops.merged([x, out])
    arguments = {
        "x": source,
        "out": target,
        "parameters": parameters,
        "scale": codes.scale,
        "codes": _record(None, codes, 1.0, 1.0 / codes.scale),
    }
    return Kernel(load_int8(), "coding", arguments)


def choose_scale(kind: operators.ChooseScale, x: View, out: View) -> Kernel:
    """Bind the choice of scale and zero point for x of any shape; None of its elements is not a number."""
    source = loops.merged([x, x])[0]
    elements = source if source.strides[-1] == 1 else source.reshaped((*source.shape, 1), (*source.strides, 1))
    *lead, count = elements.shape
    rows = loops.folded([elements.reshaped(lead, elements.strides[:-1])])[0] if lead else elements.reshaped((1,), (0,))
    assert len(rows.shape) == 1, "elements in more than rows"
    flat = elements.reshaped((rows.shape[0], count), (rows.strides[0], 1))
    return Kernel(
        load_int8(),
        "choose_scale",
        {"x": flat, "out": out, "least": kind.least, "most": kind.most, "eps": kind.eps},
    )


def codes_pool(kind: operators.Pool, x: View, out: View) -> Kernel:
    """Bind the maximum over windows of quantised values; channels are side by side."""
    arguments = {
        "x": image(x),
        "out": image(out),
        **window(kind, kind.kernel),
    }
    return Kernel(load_int8(), "codes_pool", arguments)
