"""Nets bound by the number of their operators, not by arithmetic; and residual nets (He et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_nimble.nets.blocks import Classifier, Net, conv_bn, image


class SixBranch(nn.Module):
    """Six columns of residual linears, whose mean is added to each after every fourth row."""

    def __init__(self, width: int = 64, num_branches: int = 6, depth: int = 12):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(depth)) for _ in range(num_branches)
        )
        self.depth = depth
        self.head = nn.Linear(width * num_branches, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, width]`` to ``[N, 10]``."""
        states = [x] * len(self.branches)
        for row in range(self.depth):
            states = [
                functional.relu(branch[row](state)) + state  # type: ignore[index]
                for branch, state in zip(self.branches, states, strict=True)
            ]
            if row % 4 == 3:
                mean = torch.stack(states).mean(0)
                states = [state + mean for state in states]
        result: Tensor = self.head(torch.cat(states, dim=-1))
        return result


class Recurrent(nn.Module):
    """Two recurrent layers, and a linear on the last step."""

    def __init__(self, layers: nn.GRU | nn.LSTM):
        super().__init__()
        self.layers, self.head = layers, nn.Linear(layers.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, T, width]`` to ``[N, 10]``."""
        states, _ = self.layers(x)
        result: Tensor = self.head(states[:, -1])
        return result


def six_branch(batch: int = 1) -> Net:
    """Build six branches of twelve 64 x 64 linears."""
    return Net(SixBranch(), (torch.randn(batch, 64),))


def mlp(batch: int = 1) -> Net:
    """Build sixteen 128 x 128 linears in a row."""
    rows = [part for _ in range(16) for part in (nn.Linear(128, 128), nn.ReLU())]
    for linear in rows[::2]:
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")  # type: ignore[arg-type]  # so that signals last
    return Net(nn.Sequential(*rows, nn.Linear(128, 10)), (torch.randn(batch, 128),))


def gru(batch: int = 1) -> Net:
    """Build two GRU layers of 64, 16 steps."""
    return Net(Recurrent(nn.GRU(64, 64, num_layers=2, batch_first=True)), (torch.randn(batch, 16, 64),))


def lstm(batch: int = 1) -> Net:
    """Build two LSTM layers of 64, 16 steps."""
    return Net(Recurrent(nn.LSTM(64, 64, num_layers=2, batch_first=True)), (torch.randn(batch, 16, 64),))


class Residual(nn.Module):
    """Residual block ``relu(body(x) + shortcut(x))``; the shortcut is a convolution where the shape changes."""

    def __init__(self, body: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.body, self.shortcut, self.activation = body, shortcut, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C', H', W']``."""
        result: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return result


def _block(in_channels: int, out_channels: int, stride: int, body: nn.Module) -> Residual:
    if stride == 1 and in_channels == out_channels:
        return Residual(body, nn.Identity())
    return Residual(body, conv_bn(in_channels, out_channels, 1, stride, activation=None))


def _bottleneck(in_channels: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(
        conv_bn(in_channels, width), conv_bn(width, width, 3, stride), conv_bn(width, 4 * width, activation=None)
    )
    return _block(in_channels, 4 * width, stride, body)


def _basic(in_channels: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(conv_bn(in_channels, width, 3, stride), conv_bn(width, width, 3, activation=None))
    return _block(in_channels, width, stride, body)


def _imagenet(depths: tuple[int, int, int, int]) -> nn.Module:
    parts: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            parts.append(_bottleneck(channels, width, stride=2 if stage and index == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*parts, Classifier(channels))


def resnet50(batch: int = 1) -> Net:
    """Build ResNet-50, 224 x 224."""
    return Net(_imagenet((3, 4, 6, 3)), (image(batch, 224),))


def resnet101(batch: int = 1) -> Net:
    """Build ResNet-101, 224 x 224."""
    return Net(_imagenet((3, 4, 23, 3)), (image(batch, 224),))


def resnet20_cifar(batch: int = 1) -> Net:
    """Build ResNet-20 for 32 x 32 images, its shortcuts convolutions (option B)."""
    parts: list[nn.Module] = [conv_bn(3, 16, 3)]
    channels = 16
    for stage, width in enumerate((16, 32, 64)):
        for index in range(3):
            parts.append(_basic(channels, width, stride=2 if stage and index == 0 else 1))
            channels = width
    return Net(nn.Sequential(*parts, Classifier(channels, num_classes=10)), (image(batch, 32),))
