"""Convolutions of narrow groups against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Convolution, Epilogue
from torch import Tensor, nn
from torch.nn import functional

Pieces = Callable[[Kernel, Tensor], Tensor]
Error = Callable[[Tensor, Tensor], float]


def pixels_apart(shape: tuple[int, ...], extra: int) -> Tensor:
    """Random [N, C, H, W] whose pixels lie ``C + extra`` apart."""
    return torch.randn(shape[0], *shape[2:], shape[1] + extra)[..., : shape[1]].movedim(-1, 1)


@pytest.mark.parametrize("width", [1, 6, 7, 8, 15, 20, 65])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("groups", "each"), [(2, 2), (6, 2), (8, 4), (13, 8), (3, 8), (5, 16)])
def test_groups_are_torchs(groups: int, each: int, stride: int, width: int, native: Any, pieces: Pieces, error: Error):
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
    assert convolutions.is_grouped(kind, weight, library=native)
    view = View.of(out)
    kernel = convolutions.grouped(kind, View.of(x), weight, bias, view, residual=view, library=native)
    activated = (functional.relu6 if stride == 1 else functional.silu)(expected + residual.double())
    assert error(pieces(kernel, out), activated) < 2e-6


@pytest.mark.parametrize("height", [1, 2, 5])
def test_windows_of_other_heights(height: int, native: Any, pieces: Pieces, error: Error):
    x, weight = pixels_apart((1, 24, 9, 17), 0), torch.randn(24, 4, height, 3)
    expected = functional.conv2d(x.double(), weight.double(), None, 1, (2, 0), (2, 1), groups=6)
    kind = Convolution((1, 1), ((2, 2), (0, 0)), (2, 1), 6, has_bias=False)
    out = pixels_apart(tuple(expected.shape), 1)
    kernel = convolutions.grouped(kind, View.of(x), weight, None, View.of(out), library=native)
    assert error(pieces(kernel, out), expected) < 2e-6


def test_a_neighbours_nan_stays_its_own(native: Any):
    x, weight = pixels_apart((1, 12, 6, 9), 0), torch.randn(12, 4, 3, 3)
    x[:, :4] = torch.nan  # of the first group
    out = pixels_apart((1, 12, 6, 9), 0)
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), 3, has_bias=False)
    convolutions.grouped(kind, View.of(x), weight, None, View.of(out), library=native).run()
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
