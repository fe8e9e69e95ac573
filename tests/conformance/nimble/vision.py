"""Images: convolutions, pools, normalisations, branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conformance.nimble.cases import Call, Case, normal, with_statistics

IMAGE = (2, 3, 12, 12)


def conv_net() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.LogSoftmax(1))
    return with_statistics(nn.Sequential(*layers, nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), *head))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = functional.relu(self.norms[0](self.one(x)), inplace=True)
        y = self.norms[1](self.two(y))
        y += x
        return functional.relu(y)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.conv(x))
        gate = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(functional.silu(self.down(gate))))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Conv2d(3, width, size, padding=size // 2) for width, size in ((4, 1), (6, 3), (2, 5))
        )
        self.norm = nn.BatchNorm2d(15)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        return self.norm(torch.cat([*parts, functional.avg_pool2d(x, 3, 1, 1)], 1)).relu()


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1, bias=False) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(norm(x).relu())], 1)
        return x


class ShuffleUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.conv(right)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class Reduction(nn.Module):
    """Pads, strides and cuts off what the padding made, as NASNet's reduction cells do."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.full = nn.Conv2d(4, 4, 5, 2, 2, groups=4), nn.Conv2d(4, 8, 3, 2, 1)
        self.pointwise, self.norm = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (1, 0, 1, 0))
        left = self.norm(self.pointwise(self.depthwise(padded)[:, :, 1:, 1:]))
        middle = self.full(padded)[:, :, 1:, 1:].relu()
        right = functional.max_pool2d(padded, 3, 2, 1)[:, :, 1:, 1:]
        mean = functional.avg_pool2d(padded, 3, 2, 1, count_include_pad=False)[:, :, 1:, 1:]
        return left + middle + torch.cat([right, mean], 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 3, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(functional.leaky_relu(self.down(x), 0.1))
        both = torch.cat([self.up(y), x], 1)
        return self.out(both) + functional.interpolate(y, scale_factor=2)[:, :2]


VISION = [
    Case("convolutional net", conv_net, normal(IMAGE)),
    Case("residual block", lambda: with_statistics(Residual()), normal(IMAGE)),
    Case("squeeze and excite", SqueezeExcite, normal(IMAGE)),
    Case("branches", lambda: with_statistics(Branches()), normal(IMAGE)),
    Case("dense block", lambda: with_statistics(DenseBlock()), normal((1, 3, 6, 6))),
    Case("channel shuffle", ShuffleUnit, normal((2, 8, 5, 5))),
    Case("u-net", UNet, normal((1, 3, 8, 8))),
    Case(
        "dilated and same",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2, padding="same"), nn.GELU()),
        normal(IMAGE),
    ),
    Case("even kernel, same", lambda: nn.Conv2d(3, 4, 4, padding="same"), normal(IMAGE)),
    Case(
        "convolution 1d",
        lambda: nn.Sequential(nn.Conv1d(4, 6, 5, 2, 2), nn.BatchNorm1d(6), nn.Tanh()),
        normal((2, 4, 15)),
    ),
    Case(
        "convolution 3d", lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.ReLU(), nn.MaxPool3d(2)), normal((1, 2, 6, 6, 6))
    ),
    Case(
        "pools",
        lambda: Call(
            lambda x: (
                functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
                functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
                functional.adaptive_avg_pool2d(x, 4),
                functional.adaptive_avg_pool2d(x, 5),
            )
        ),
        normal(IMAGE),
    ),
    Case("padded and cropped", lambda: with_statistics(Reduction()), normal((1, 4, 9, 9))),
    Case("group norm", lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()), normal(IMAGE)),
    Case("instance norm", lambda: nn.InstanceNorm2d(3, affine=True), normal(IMAGE)),
    Case(
        "pixel shuffle",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
        normal(IMAGE),
    ),
    Case(
        "padding",
        lambda: Call(
            lambda x: (
                functional.pad(x, (1, 2, 0, 1), value=0.5),
                functional.pad(x, (1, 1), mode="reflect"),
                functional.pad(x, (-1, 0)),
            )
        ),
        normal((2, 3, 4)),
    ),
    Case("batch norm that learns its statistics", lambda: nn.BatchNorm2d(3).train(), normal(IMAGE)),
]
