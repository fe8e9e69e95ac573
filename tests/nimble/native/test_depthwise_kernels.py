"""Convolutions of one channel or few a group, alone and before a 1x1 convolution, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Convolution, Epilogue, Separable
from torch import Tensor, nn
from torch.nn import functional

from tests.nimble.native.conftest import error_of, in_pieces


def pixels_apart(shape: tuple[int, ...], extra: int) -> Tensor:
    """Random [N, C, *space] whose pixels lie ``C + extra`` apart."""
    return torch.randn(shape[0], *shape[2:], shape[1] + extra)[..., : shape[1]].movedim(-1, 1)


@pytest.mark.parametrize("channels", [3, 11, 16, 44, 72])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_depthwise_is_torchs(size: int, stride: int, dilation: int, channels: int, native: Any):
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
    kernel = convolutions.depthwise(kind, View.of(x), weight, bias, view, residual=view)
    activated = (functional.relu6 if stride == 1 else functional.silu)(expected + residual.double())
    assert error_of(in_pieces(kernel, out), activated) < 2e-6


def test_a_line_of_samples(native: Any):
    x, weight = pixels_apart((2, 20, 150), 0), torch.randn(20, 1, 5)
    kind = Convolution((1,), ((2, 2),), (1,), 20, has_bias=False)
    out = pixels_apart((2, 20, 150), 0)
    kernel = convolutions.depthwise(kind, View.of(x), weight, None, View.of(out))
    expected = functional.conv1d(x.double(), weight.double(), padding=2, groups=20)
    assert error_of(in_pieces(kernel, out), expected) < 2e-6


@pytest.mark.parametrize("width", [1, 4, 8, 9, 15, 64, 65, 131])
@pytest.mark.parametrize("stride", [1, 2])
def test_widths_that_are_no_multiples_of_a_tile(width: int, stride: int, native: Any):
    x, weight = pixels_apart((2, 40, 6, width), 3), torch.randn(40, 1, 3, 3)
    expected = functional.conv2d(x.double(), weight.double(), padding=1, stride=stride, groups=40)
    out = pixels_apart(tuple(expected.shape), 1)
    kind = Convolution((stride, stride), ((1, 1), (1, 1)), (1, 1), 40, has_bias=False)
    kernel = convolutions.depthwise(kind, View.of(x), weight, None, View.of(out))
    assert error_of(in_pieces(kernel, out), expected) < 2e-6


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("width", [35, 70])
@pytest.mark.parametrize(
    ("images", "height"), [(2, 6), (1, 3)]
)  # of 3 rows each is still held when the next piece begins
def test_pixels_that_share_sets_of_the_cache_are_copied_side_by_side(
    images: int, height: int, width: int, dilation: int, native: Any
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
    kernel = convolutions.depthwise(kind, View.of(x), weight, bias, view, residual=view)
    assert kernel.units == images * height * ((width + 63) // 64) * 16  # rows, spans, and pieces of 32 channels
    assert error_of(in_pieces(kernel, out), functional.relu(expected + residual.double())) < 2e-6


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("channels", "columns"), [(3, 5), (16, 24), (44, 44), (20, 100)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("width", [9, 70])
def test_separables_are_two_convolutions(
    channels: int, columns: int, kernel: int, stride: int, width: int, native: Any
):
    torch.manual_seed(0)
    pad = kernel // 2
    depthwise = Convolution((stride, stride), ((pad, pad), (pad, pad)), (1, 1), channels, True, Epilogue("relu6"))
    pointwise = Convolution((1, 1), ((0, 0), (0, 0)), (1, 1), 1, True, Epilogue("silu", has_residual=True))
    x = channels_last(2, channels, 7, width)
    weights = [torch.randn(channels, 1, kernel, kernel), torch.randn(columns, channels, 1, 1)]
    biases = [torch.randn(channels), torch.randn(columns)]
    between = functional.relu6(
        functional.conv2d(x.double(), weights[0].double(), biases[0].double(), stride, pad, 1, channels)
    )
    product = functional.conv2d(between, weights[1].double(), biases[1].double())
    residual, out = channels_last(*product.shape), channels_last(*product.shape)
    kernel_ = convolutions.separable(
        Separable(depthwise, pointwise), View.of(x), weights, biases, View.of(out), residual=View.of(residual)
    )
    expected = functional.silu(product + residual.double())
    assert error_of(in_pieces(kernel_, out), expected) < 3e-6


@pytest.mark.parametrize("width", [1, 6, 7, 8, 15, 20, 65])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("groups", "each"), [(2, 2), (6, 2), (8, 4), (13, 8), (3, 8), (5, 16)])
def test_groups_are_torchs(groups: int, each: int, stride: int, width: int, native: Any):
    if native.kernel_lanes() % each:
        pytest.skip("wider than a vector: the usual kernel")
    channels = groups * each
    torch.manual_seed(width)
    x, bias = pixels_apart((2, channels, 5, width), 3), torch.randn(channels)
    weight = torch.randn(channels, each, 3, 3) / 10
    expected = functional.conv2d(x.double(), weight.double(), bias.double(), stride, 1, groups=groups)
    out = pixels_apart(tuple(expected.shape), 5)
    residual = out.clone()
    epilogue = Epilogue("relu6" if stride == 1 else "silu", has_residual=True)
    kind = Convolution((stride, stride), ((1, 1), (1, 1)), (1, 1), groups, has_bias=True, epilogue=epilogue)
    assert convolutions.is_grouped(kind, weight)
    view = View.of(out)
    kernel = convolutions.grouped(kind, View.of(x), weight, bias, view, residual=view)
    activated = (functional.relu6 if stride == 1 else functional.silu)(expected + residual.double())
    assert error_of(in_pieces(kernel, out), activated) < 2e-6


@pytest.mark.parametrize("height", [1, 2, 5])
def test_windows_of_other_heights(height: int, native: Any):
    x, weight = pixels_apart((1, 24, 9, 17), 0), torch.randn(24, 4, height, 3)
    expected = functional.conv2d(x.double(), weight.double(), None, 1, (2, 0), (2, 1), groups=6)
    kind = Convolution((1, 1), ((2, 2), (0, 0)), (2, 1), 6, has_bias=False)
    out = pixels_apart(tuple(expected.shape), 1)
    kernel = convolutions.grouped(kind, View.of(x), weight, None, View.of(out))
    assert error_of(in_pieces(kernel, out), expected) < 2e-6


def test_a_neighbours_nan_stays_its_own(native: Any):
    x, weight = pixels_apart((1, 12, 6, 9), 0), torch.randn(12, 4, 3, 3)
    x[:, :4] = torch.nan  # of the first group
    out = pixels_apart((1, 12, 6, 9), 0)
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), 3, has_bias=False)
    convolutions.grouped(kind, View.of(x), weight, None, View.of(out)).run()
    assert out[:, :4].isnan().all()
    assert out[:, 4:].isfinite().all()


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(32, 32, 3, groups=32),  # depthwise
        nn.Conv2d(32, 64, 3, groups=8),  # gives more than it takes
        nn.Conv2d(36, 36, 3, groups=12),  # three channels
        nn.Conv2d(32, 32, 5, groups=8),
        nn.Conv2d(32, 32, 3, stride=3, groups=8),
        nn.Conv2d(32, 32, 3, dilation=2, groups=8),
    ],
)
def test_others_are_left_to_the_usual_kernel(convolution: nn.Conv2d):
    kind = Convolution(
        convolution.stride,
        ((0, 0), (0, 0)),
        convolution.dilation,
        convolution.groups,
        has_bias=True,  # type: ignore[arg-type]
    )
    assert not convolutions.is_grouped(kind, convolution.weight)
