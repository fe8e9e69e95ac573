"""Batch norms of training beside torch's, and beside float64."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import BatchNormTraining, Epilogue
from mlsys_nimble.training import kernels
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kernel_level")

# Channels in vectors, which are taken whole.
SHAPES = [(2, 1, 3, 3), (4, 2, 9, 7), (1, 8, 33, 31), (5, 3, 1, 1), (300, 4)]


def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with its channels in numbers: a vector has as many as this machine's have."""
    return (shape[0], shape[1] * kernels.load().kernel_lanes(), *shape[2:])


def image(shape: tuple[int, ...], *, mean: float = 0.0) -> Tensor:
    x = torch.randn(shape) + mean
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def run(found: list[kernels.Kernel], num_threads: int) -> None:
    kernels.KernelList(found, num_threads).run()


def views(*tensors: Tensor) -> list[View]:
    return [View.of(tensor) for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("has_residual", [False, True])
def test_forward(shape: tuple[int, ...], num_threads: int, has_residual: bool):
    torch.manual_seed(0)
    shape = whole(shape)
    channels = shape[1]
    x, residual = image(shape, mean=30.0), image(shape)
    weight, bias, mean, var = (torch.rand(channels) + 0.5 for _ in range(4))
    outputs = [torch.empty_like(x), *(torch.empty(channels) for _ in range(4))]
    kind = BatchNormTraining(0.1, 1e-5, Epilogue("relu" if has_residual else None, has_residual=has_residual))
    inputs = (x, weight, bias, mean, var, *([residual] if has_residual else []))
    run(kernels.batch_norm(kind, views(*inputs), views(*outputs)), num_threads)
    new_mean, new_var = mean.double(), var.double()
    y = torch.nn.functional.batch_norm(x.double(), new_mean, new_var, weight.double(), bias.double(), True, 0.1, 1e-5)
    y = torch.relu(y + residual) if has_residual else y
    dims = [dim for dim in range(x.dim()) if dim != 1]
    rstd = 1 / (x.double().var(dims, correction=0) + 1e-5).sqrt()
    for made, wanted in zip(outputs, (y, x.double().mean(dims), rstd, new_mean, new_var), strict=True):
        torch.testing.assert_close(made, wanted.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gradient(shape: tuple[int, ...], num_threads: int):
    torch.manual_seed(0)
    shape = whole(shape)
    channels = shape[1]
    x, dy = image(shape, mean=-5.0), image(shape)
    weight = torch.rand(channels) + 0.5
    dims = [dim for dim in range(x.dim()) if dim != 1]
    mean, rstd = x.mean(dims), 1 / (x.double().var(dims, correction=0) + 1e-5).sqrt().float()
    outputs = [torch.empty_like(x), torch.empty(channels), torch.empty(channels)]
    run(kernels.batch_norm_gradient(views(dy, x, weight, mean, rstd), views(*outputs)), num_threads)
    exact = (
        x.double().requires_grad_(),
        weight.double().requires_grad_(),
        torch.zeros(channels).double().requires_grad_(),
    )
    y = torch.nn.functional.batch_norm(exact[0], None, None, exact[1], exact[2], True, 0.1, 1e-5)
    for made, wanted in zip(outputs, torch.autograd.grad(y, exact, dy.double()), strict=True):
        torch.testing.assert_close(made, wanted.float(), rtol=5e-5, atol=5e-5)


def test_only_whole_vectors_channels_last_are_taken():
    lanes = kernels.load().kernel_lanes()
    assert kernels.takes(View.of(image((2, lanes, 3, 3))))
    assert not kernels.takes(View.of(image((2, lanes + 1, 3, 3))))
    assert not kernels.takes(View.of(torch.randn(2, lanes, 3, 3)))
    assert not kernels.takes(View.of(image((2, lanes, 3, 3)).double()))
    assert not kernels.takes(View.of(image((1, lanes, 1, 1))))  # a variance of one number
