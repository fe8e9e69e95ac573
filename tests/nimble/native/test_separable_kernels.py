"""A depthwise convolution and the 1x1 convolution after it in one kernel, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Convolution, Epilogue, Separable
from torch import Tensor
from torch.nn import functional

from tests.nimble.native.conftest import relative_error, run_in_pieces


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
        Separable(depthwise, pointwise),
        View.of(x),
        weights,
        biases,
        View.of(out),
        residual=View.of(residual),
        library=native,
    )
    expected = functional.silu(product + residual.double())
    assert relative_error(run_in_pieces(kernel_, out), expected) < 3e-6
