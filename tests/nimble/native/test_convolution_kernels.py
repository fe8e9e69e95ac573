"""Convolutions and linears against torch in float64: windows, strides, groups, epilogues, windows on wider tensors."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Literal, get_args

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Activation, Convolution, Epilogue, Linear
from torch import Tensor
from torch.nn import functional

from tests.nimble.native.conftest import error_of, in_pieces

TOLERANCE = 5e-6  # in the scale of the result, for sums of up to 3600 products


def channels_last(shape: tuple[int, ...], *, extra: int = 0) -> Tensor:
    """Random [N, C, *space] whose pixels lie ``C + extra`` apart."""
    whole = torch.randn(shape[0], *shape[2:], shape[1] + extra)
    return whole[..., : shape[1]].movedim(-1, 1)


def activated(y: Tensor, epilogue: Epilogue, residual: Tensor | None) -> Tensor:
    act: dict[str | None, Any] = {
        None: lambda x: x,
        "leaky_relu": lambda x: functional.leaky_relu(x, epilogue.slope),
        "elu": lambda x: functional.elu(x, epilogue.slope),
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    function = act.get(epilogue.activation) or getattr(functional, str(epilogue.activation))
    if residual is None:
        return function(y)
    return function(y) + residual if epilogue.activates_first else function(y + residual)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Convolution, residual: Tensor | None) -> Tensor:
    amounts = [amount for pair in reversed(kind.padding) for amount in pair]
    padded = functional.pad(x.double(), amounts)
    function = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[x.dim()]
    y = function(
        padded,
        weight.double(),
        None if bias is None else bias.double(),
        stride=kind.stride,
        dilation=kind.dilation,
        groups=kind.groups,
    )
    return activated(y, kind.epilogue, None if residual is None else residual.double())


def plain(dims: int = 2, **fields: Any) -> Convolution:
    defaults: dict[str, Any] = {
        "stride": (1,) * dims,
        "padding": ((0, 0),) * dims,
        "dilation": (1,) * dims,
        "groups": 1,
        "has_bias": True,
    }
    return Convolution(**(defaults | fields))


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Convolution]] = {  # x, weight, kind
    "1x1": ((2, 24, 7, 9), (40, 24, 1, 1), plain()),
    "1x1 deep": ((1, 700, 14, 14), (33, 700, 1, 1), plain()),
    "1x1 deep and wide": ((1, 700, 14, 14), (200, 700, 1, 1), plain()),  # several sets of panels
    "1x1 deep groups": ((1, 820, 14, 14), (180, 410, 1, 1), plain(groups=2)),
    "1x1 stride": ((1, 16, 9, 11), (24, 16, 1, 1), plain(stride=(2, 2))),
    "1x1 one pixel": ((1, 320, 1, 1), (17, 320, 1, 1), plain()),
    "3x3": ((2, 16, 13, 11), (16, 16, 3, 3), plain(padding=((1, 1), (1, 1)))),
    "3x3 deep": ((1, 400, 5, 6), (24, 400, 3, 3), plain(padding=((1, 1), (1, 1)), has_bias=False)),
    "3x3 stride": ((1, 32, 15, 14), (8, 32, 3, 3), plain(padding=((0, 1), (1, 0)), stride=(2, 2))),
    "dilated": ((1, 12, 17, 15), (20, 12, 3, 3), plain(padding=((2, 2), (3, 3)), dilation=(2, 3))),
    "images side by side in a block": ((5, 16, 5, 7), (24, 16, 3, 3), plain(padding=((1, 1), (1, 1)), stride=(2, 2))),
    "1x7": ((1, 20, 9, 17), (50, 20, 1, 7), plain(padding=((0, 0), (3, 3)))),
    "7x1": ((1, 20, 17, 9), (5, 20, 7, 1), plain(padding=((3, 3), (0, 0)))),
    "cropped": ((1, 9, 12, 12), (10, 9, 3, 3), plain(padding=((-1, 2), (1, -2)))),
    "groups": ((2, 24, 8, 9), (36, 8, 3, 3), plain(padding=((1, 1), (1, 1)), groups=3)),
    "groups 1x1": ((1, 40, 6, 6), (20, 10, 1, 1), plain(groups=4)),
    "narrow groups": ((2, 21, 8, 9), (18, 7, 3, 3), plain(padding=((1, 1), (1, 1)), groups=3)),
    "groups of 8": ((1, 24, 8, 9), (24, 8, 3, 3), plain(padding=((1, 1), (1, 1)), groups=3)),
    "groups of 16": ((1, 48, 8, 9), (48, 16, 3, 3), plain(padding=((1, 1), (1, 1)), groups=3)),
    "image": ((1, 3, 37, 41), (24, 3, 7, 7), plain(padding=((3, 3), (3, 3)), stride=(2, 2))),
    "image 3x3": ((2, 3, 19, 18), (16, 3, 3, 3), plain(padding=((1, 1), (0, 2)))),
    "image dilated": ((1, 4, 19, 18), (9, 4, 3, 3), plain(padding=((2, 2), (2, 2)), dilation=(2, 2))),
    "image 1x1": ((1, 1, 5, 4), (3, 1, 1, 1), plain()),
    "1d": ((2, 18, 50), (30, 18, 5), plain(1, padding=((2, 2),))),
    "1d samples": ((1, 1, 300), (32, 1, 16), plain(1, padding=((7, 8),), stride=(4,))),
    "3d": ((1, 8, 5, 6, 7), (16, 8, 3, 3, 3), plain(3, padding=((1, 1),) * 3, stride=(1, 2, 1))),
    "3d image": ((1, 2, 5, 6, 7), (6, 2, 3, 3, 3), plain(3, padding=((1, 1),) * 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_convolutions_are_torchs(case: str, native: Any):
    torch.manual_seed(0)
    shape, weight_shape, kind = CASES[case]
    x, weight = channels_last(shape, extra=3), torch.randn(weight_shape)
    bias = torch.randn(weight_shape[0]) if kind.has_bias else None
    expected = convolved(x, weight, bias, kind, None)
    out = channels_last(tuple(expected.shape), extra=5)
    outside = out.as_strided((out.numel() // out.shape[1], 5), (out.shape[1] + 5, 1), out.shape[1])
    before = outside.clone()
    kernel = convolutions.convolution(kind, View.of(x), weight, bias, View.of(out))
    assert error_of(in_pieces(kernel, out), expected) < TOLERANCE
    assert torch.equal(outside, before), "written beyond the channels of the result"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activation", [None, *get_args(Activation)])
@pytest.mark.parametrize("case", ["1x1", "1x1 deep and wide", "3x3 deep", "image 3x3", "groups", "narrow groups"])
def test_epilogues_also_in_place(case: str, activation: Activation | None, first: bool, native: Any):
    torch.manual_seed(1)
    shape, weight_shape, kind = CASES[case]
    kind = replace(kind, epilogue=Epilogue(activation, 0.2, has_residual=True, activates_first=first))
    x, bias = channels_last(shape), torch.randn(weight_shape[0])
    weight = torch.randn(weight_shape) / prod(weight_shape[1:]) ** 0.5
    without = replace(kind, epilogue=Epilogue(activation, 0.2))
    out = channels_last(tuple(convolved(x, weight, bias, without, None).shape))
    expected = convolved(x, weight, bias, kind, out)
    view = View.of(out)
    kernel = convolutions.convolution(kind, View.of(x), weight, bias, view, residual=view)
    assert error_of(in_pieces(kernel, out), expected) < TOLERANCE
    kernel = convolutions.convolution(without, View.of(x), weight, bias, view)
    assert error_of(in_pieces(kernel, out), convolved(x, weight, bias, without, None)) < TOLERANCE


@pytest.mark.parametrize("case", ["1x1", "3x3", "image"])
def test_callers_tensors_are_found_at_each_run(case: str, native: Any):
    shape, weight_shape, kind = CASES[case]
    images = [channels_last(shape), channels_last(shape)]
    weight, bias = torch.randn(weight_shape), torch.randn(weight_shape[0])
    wanted = [convolved(x, weight, bias, kind, None) for x in images]
    outs = [channels_last(tuple(y.shape)) for y in wanted]
    slots = torch.zeros(2, dtype=torch.int64)
    x, out = View.of(images[0]), View.of(outs[0])
    x = View(None, x.dtype, x.shape, x.strides, slot=slots.data_ptr())
    out = View(None, out.dtype, out.shape, out.strides, slot=slots.data_ptr() + 8)
    kernel = convolutions.convolution(kind, x, weight, bias, out)
    for image, result, expected in zip(images, outs, wanted, strict=True):
        slots[0], slots[1] = image.data_ptr(), result.data_ptr()
        kernel.run()
        assert error_of(result, expected) < TOLERANCE


def test_an_image_of_planes_is_taken_as_it_is(native: Any):
    shape, weight_shape, kind = CASES["image"]
    x, weight, bias = torch.randn(shape), torch.randn(weight_shape), torch.randn(weight_shape[0])
    expected = convolved(x, weight, bias, kind, None)
    out = channels_last(tuple(expected.shape))
    kernel = convolutions.convolution(kind, View.of(x), weight, bias, View.of(out))
    assert error_of(in_pieces(kernel, out), expected) < TOLERANCE


def test_a_window_of_rows_is_read_and_written_where_it_lies(native: Any):
    kind = plain()
    x, weight, bias = channels_last((2, 16, 12, 14))[:, :, 2:9, 3:12], torch.randn(20, 16, 1, 1), torch.randn(20)
    whole = channels_last((2, 20, 9, 11))
    out = whole[:, :, 1:8, 2:11]
    kernel = convolutions.convolution(kind, View.of(x), weight, bias, View.of(out))
    assert error_of(in_pieces(kernel, out), convolved(x, weight, bias, kind, None)) < TOLERANCE


@pytest.mark.parametrize("columns", [1, 8, 17, 24, 100])
@pytest.mark.parametrize("rows", [(1,), (2,), (3,), (7,), (128,), (2, 3, 5)], ids=str)
def test_linears_are_torchs(rows: tuple[int, ...], columns: int, native: Any):
    torch.manual_seed(2)
    x, weight, bias = torch.randn(*rows, 355), torch.randn(columns, 355), torch.randn(columns)
    out, residual = torch.zeros(*rows, columns), torch.randn(*rows, columns)
    kind = Linear(has_bias=True, epilogue=Epilogue("gelu", has_residual=True))
    kernel = convolutions.linear(kind, View.of(x), weight, bias, View.of(out), residual=View.of(residual))
    product = functional.linear(x.double(), weight.double(), bias.double())
    assert error_of(in_pieces(kernel, out), activated(product, kind.epilogue, residual.double())) < TOLERANCE


SHAPES = {  # N, C, H, W, O
    "one tile": (1, 16, 2, 2, 16),
    "ragged": (2, 48, 13, 11, 64),
    "deep": (1, 400, 9, 9, 32),
    "wide": (1, 32, 28, 30, 80),
    "many panels": (1, 16, 7, 7, 208),
}


def pixels_apart(shape: tuple[int, ...], extra: int) -> Tensor:
    return torch.randn(shape[0], *shape[2:], shape[1] + extra)[..., : shape[1]].movedim(-1, 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 2), (2, 1))], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_winograd_is_torchs(
    shape: str,
    padding: tuple[tuple[int, int], ...],
    activation: Literal["relu", "silu"],
    size: Literal[2, 4],
    native: Any,
):
    torch.manual_seed(0)
    n, channels, height, width, columns = SHAPES[shape]
    x = pixels_apart((n, channels, height, width), 3)
    weight, bias = torch.randn(columns, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(columns)
    padded = functional.pad(x.double(), [*padding[1], *padding[0]])
    product = functional.conv2d(padded, weight.double(), bias.double())
    out = pixels_apart(tuple(product.shape), 5)
    outside = out.as_strided((out.numel() // columns, 5), (columns + 5, 1), columns)
    before = outside.clone()
    epilogue = Epilogue(activation, has_residual=True)
    expected = getattr(functional, activation)(product + out.double())
    kind, view = Convolution((1, 1), padding, (1, 1), 1, has_bias=True, epilogue=epilogue), View.of(out)
    kernel = convolutions.winograd(kind, View.of(x), weight, bias, view, size=size, residual=view)
    assert error_of(in_pieces(kernel, out), expected) < (5e-6 if size == 4 else 2e-6)
    assert torch.equal(outside, before), "written beyond the channels of the result"


def test_unsupported_convolutions_are_not_taken(native: Any):
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), 1, has_bias=False)
    assert convolutions.is_winograd(kind, torch.zeros(32, 16, 3, 3))
    assert not convolutions.is_winograd(kind, torch.zeros(33, 16, 3, 3))
    assert not convolutions.is_winograd(kind, torch.zeros(32, 16, 1, 1))
    strided = Convolution((2, 2), ((1, 1), (1, 1)), (1, 1), 1, has_bias=False)
    assert not convolutions.is_winograd(strided, torch.zeros(32, 16, 3, 3))
