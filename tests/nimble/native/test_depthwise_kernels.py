"""Depthwise convolutions against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Convolution, Epilogue
from torch import Tensor
from torch.nn import functional

Pieces = Callable[[Kernel, Tensor], Tensor]
Error = Callable[[Tensor, Tensor], float]


def pixels_apart(shape: tuple[int, ...], extra: int) -> Tensor:
    """Random [N, C, *space] whose pixels lie ``C + extra`` apart."""
    return torch.randn(shape[0], *shape[2:], shape[1] + extra)[..., : shape[1]].movedim(-1, 1)


@pytest.mark.parametrize("channels", [3, 11, 16, 44, 72])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_depthwise_is_torchs(
    size: int, stride: int, dilation: int, channels: int, native: Any, pieces: Pieces, error: Error
):
    torch.manual_seed(size)
    reach = (size - 1) * dilation
    padding = ((reach // 2, reach // 2), (reach // 2, reach // 2 + 1))
    x, weight, bias = pixels_apart((2, channels, 9, 13), 4), torch.randn(channels, 1, size, size), torch.randn(channels)
    padded = functional.pad(x.double(), [*padding[1], *padding[0]])
    expected = functional.conv2d(
        padded, weight.double(), bias.double(), stride=stride, dilation=dilation, groups=channels
    )
    out = pixels_apart(tuple(expected.shape), 5)
    residual = out.clone()
    kind = Convolution(
        (stride, stride),
        padding,
        (dilation, dilation),
        channels,
        has_bias=True,
        epilogue=Epilogue("relu6" if stride == 1 else "silu", has_residual=True),
    )
    view = View.of(out)
    kernel = convolutions.depthwise(kind, View.of(x), weight, bias, view, residual=view, library=native)
    activated = (functional.relu6 if stride == 1 else functional.silu)(expected + residual.double())
    assert error(pieces(kernel, out), activated) < 2e-6


def test_a_line_of_samples(native: Any, pieces: Pieces, error: Error):
    x, weight = pixels_apart((2, 20, 150), 0), torch.randn(20, 1, 5)
    kind = Convolution((1,), ((2, 2),), (1,), 20, has_bias=False)
    out = pixels_apart((2, 20, 150), 0)
    kernel = convolutions.depthwise(kind, View.of(x), weight, None, View.of(out), library=native)
    expected = functional.conv1d(x.double(), weight.double(), padding=2, groups=20)
    assert error(pieces(kernel, out), expected) < 2e-6


@pytest.mark.parametrize("width", [1, 4, 8, 9, 15, 64, 65, 131])
@pytest.mark.parametrize("stride", [1, 2])
def test_widths_that_are_no_multiples_of_a_tile(width: int, stride: int, native: Any, pieces: Pieces, error: Error):
    x, weight = pixels_apart((2, 40, 6, width), 3), torch.randn(40, 1, 3, 3)
    expected = functional.conv2d(x.double(), weight.double(), padding=1, stride=stride, groups=40)
    out = pixels_apart(tuple(expected.shape), 1)
    kind = Convolution((stride, stride), ((1, 1), (1, 1)), (1, 1), 40, has_bias=False)
    kernel = convolutions.depthwise(kind, View.of(x), weight, None, View.of(out), library=native)
    assert error(pieces(kernel, out), expected) < 2e-6


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("width", [35, 70])
@pytest.mark.parametrize(
    ("images", "height"), [(2, 6), (1, 3)]
)  # of 3 rows each is still held when the next piece begins
def test_pixels_that_share_sets_of_the_cache_are_copied_side_by_side(
    images: int, height: int, width: int, dilation: int, native: Any, pieces: Pieces, error: Error
):
    x, weight, bias = pixels_apart((images, 512, height, width), 0), torch.randn(512, 1, 5, 5), torch.randn(512)
    expected = functional.conv2d(
        x.double(), weight.double(), bias.double(), padding=2 * dilation, dilation=dilation, groups=512
    )
    out = pixels_apart(tuple(expected.shape), 0)
    residual = out.clone()
    epilogue = Epilogue("relu", has_residual=True)
    apart = 2 * dilation
    kind = Convolution((1, 1), ((apart, apart),) * 2, (dilation,) * 2, 512, has_bias=True, epilogue=epilogue)
    view = View.of(out)
    kernel = convolutions.depthwise(kind, View.of(x), weight, bias, view, residual=view, library=native)
    assert kernel.units == images * height * ((width + 63) // 64) * 16  # rows, spans, and pieces of 32 channels
    assert error(pieces(kernel, out), functional.relu(expected + residual.double())) < 2e-6
