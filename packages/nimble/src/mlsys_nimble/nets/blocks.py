"""Building blocks of the nets, and batch norm statistics that suit random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Net(NamedTuple):
    """Module, and tensors to call it with: ``module(*inputs)``."""

    module: nn.Module
    inputs: tuple[Tensor, ...]

    def on(self, device: str) -> Net:
        """Return the net and its inputs on a device, by torch's name."""
        return Net(self.module.to(device), tree_map_only(Tensor, lambda tensor: tensor.to(device), self.inputs))


class Concat(nn.ModuleList):
    """Branches that read the same input, with their results concatenated along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [N, C, H, W]`` to ``[N, sum of the branches' channels, H', W']``."""
        return torch.cat([branch(x) for branch in self], dim=1)


def image(batch: int, size: int) -> Tensor:
    """Return a normal float32 ``[batch, 3, size, size]``."""
    return torch.randn(batch, 3, size, size)


def conv_bn(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, int] = 1,
    stride: int = 1,
    *,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
    eps: float = 1e-5,
    activation: Callable[[], nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Build a convolution without bias, batch norm and, unless None, an activation; ``padding`` None keeps the size."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
    parts = [convolution, nn.BatchNorm2d(out_channels, eps=eps)]
    return nn.Sequential(*parts, *([activation()] if activation else []))


class Classifier(nn.Sequential):
    """Classifier head: the mean over pixels of ``[N, C, H, W]``, then a linear to ``[N, num_classes]``."""

    def __init__(self, in_channels: int, num_classes: int = 1000):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))


def settle(net: Net) -> Net:
    """Give batch norms the statistics of the example, and put the net in eval mode.

    With initial statistics, the activations of a deep net of random weights vanish or explode, and either hides a wrong
    result. So each batch norm measures its input in one run of the example.
    """
    norms = [module for module in net.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    net.module.eval().requires_grad_(False)
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.1)
        norm.momentum = None  # statistics become those of the one call below
        norm.train()
    if norms:
        with torch.no_grad():
            net.module(*net.inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    return net
