"""What the nets are put together from, and what makes their random weights fit to be measured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Net(NamedTuple):
    """A module and tensors to call it with: ``module(*inputs)``."""

    module: nn.Module
    inputs: tuple[Tensor, ...]

    def on(self, place: str) -> Net:
        """Return the same on the device that torch calls ``place``."""
        return Net(self.module.to(place), tree_map_only(Tensor, lambda tensor: tensor.to(place), self.inputs))


class Concat(nn.ModuleList):
    """Branches that read the same input; -> their results one after another along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, H, W]`` -> ``[N, sum of the branches' channels, H', W']``."""
        return torch.cat([branch(x) for branch in self], dim=1)


def image(batch: int, size: int) -> Tensor:
    """Float32 ``[batch, 3, size, size]``, normal."""
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
    """Convolution without bias, batch norm, and an activation unless None; ``padding`` None keeps the size."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
    parts = [convolution, nn.BatchNorm2d(out_channels, eps=eps)]
    return nn.Sequential(*parts, *([activation()] if activation else []))


class Classifier(nn.Sequential):
    """``[N, C, H, W]`` -> mean over the pixels -> ``[N, num_classes]``."""

    def __init__(self, in_channels: int, num_classes: int = 1000):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))


def settle(net: Net) -> Net:
    """Give batch norms the statistics of the example, and everything else its mode for inference.

    With the statistics that modules start with, the activations of a deep net of random weights vanish or explode, and
    a wrong result hides in either. So each batch norm measures what it is given while the example passes.
    """
    norms = [module for module in net.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    net.module.eval().requires_grad_(False)
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.1)
        norm.momentum = None  # the mean of all it has seen: of this one call
        norm.train()
    if norms:
        with torch.no_grad():
            net.module(*net.inputs)
    for norm in norms:
        norm.eval()
    return net
