"""Layer norms that our kernels do not take: eager's results and gradients all the same."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble import Nimble
from torch import Tensor, nn
from torch.nn import functional


class Norm(nn.Module):
    def __init__(self, num_dims: int, *, has_weight: bool) -> None:
        super().__init__()
        self.num_dims = num_dims
        self.weight = nn.Parameter(torch.rand(8)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-self.num_dims :], self.weight)


@pytest.mark.parametrize(("num_dims", "has_weight"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
def test_without_weight_or_bias(shape: tuple[int, ...], num_dims: int, has_weight: bool):
    torch.manual_seed(0)
    net = Norm(num_dims, has_weight=has_weight)
    found = []
    for model in (net, Nimble(net).prepare(torch.zeros(shape, requires_grad=True), training=True)):
        x = torch.linspace(-1, 2, 8 * torch.Size(shape[:-1]).numel()).square().reshape(shape).requires_grad_()
        y = model(x)
        net.zero_grad()
        (y * torch.arange(8)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
    for ours, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
