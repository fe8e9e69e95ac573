"""Winograd's convolutions against torch in float64, within 5e-6 of the result's scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Convolution, Epilogue
from torch import Tensor
from torch.nn import functional

Pieces = Callable[[Kernel, Tensor], Tensor]
Error = Callable[[Tensor, Tensor], float]
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
    pieces: Pieces,
    error: Error,
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
    kernel = convolutions.winograd(kind, View.of(x), weight, bias, view, size=size, residual=view, library=native)
    assert error(pieces(kernel, out), expected) < (5e-6 if size == 4 else 2e-6)
    assert torch.equal(outside, before), "written beyond the channels of the result"


def test_unsupported_convolutions_are_not_taken(native: Any):
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), 1, has_bias=False)
    assert convolutions.is_winograd(kind, torch.zeros(32, 16, 3, 3), library=native)
    assert not convolutions.is_winograd(kind, torch.zeros(33, 16, 3, 3), library=native)
    assert not convolutions.is_winograd(kind, torch.zeros(32, 16, 1, 1), library=native)
    strided = Convolution((2, 2), ((1, 1), (1, 1)), (1, 1), 1, has_bias=False)
    assert not convolutions.is_winograd(strided, torch.zeros(32, 16, 3, 3), library=native)
