"""GEMMs by torch into planned memory: nothing is allocated, and memory is reused while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlsys_nimble.ir.strides import Shape, Strides, dense, row_major
from mlsys_nimble.training.convolutions import Work, strides_of_result


@dataclass(frozen=True, slots=True)
class Into:
    """Function of torch for an operator that writes into given memory.

    A call without ``out`` allocates its result.
    """

    shape: Shape
    strides: Strides
    write: Callable[..., Any]  # (out, *inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result in new memory."""
        out = torch.empty_strided(self.shape, self.strides)
        self.write(out, *inputs)
        return out


def gemm(shape: Shape) -> Into:
    """Return the product of a [M, K] and b [K, N] in float32."""
    return Into(shape, dense(shape, row_major(2)), lambda out, a, b: torch.mm(a, b, out=out))


def pixels(work: Work) -> Into:
    """Return a convolution of single pixels, or a gradient of it, as a GEMM of rows of channels-last images."""

    def rows(image: Tensor) -> Tensor:
        return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])

    def forward(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        matrix = weight.flatten(1).t()
        if bias is None:
            torch.mm(rows(x), matrix, out=rows(out))
        else:
            torch.addmm(bias, rows(x), matrix, out=rows(out))

    def input_gradient(out: Tensor, dy: Tensor, _x: Tensor, weight: Tensor) -> None:
        torch.mm(rows(dy), weight.flatten(1), out=rows(out))

    def weight_gradient(out: Tensor, dy: Tensor, x: Tensor, _weight: Tensor) -> None:
        torch.mm(rows(dy).t(), rows(x), out=out.flatten(1))

    if work.role == "forward":
        return Into(work.y, strides_of_result(work), forward)
    if work.role == "input gradient":
        return Into(work.x, strides_of_result(work), input_gradient)
    return Into(work.weight, strides_of_result(work), weight_gradient)
