"""Nets of inverted residual blocks: MobileNetV2 (Sandler et al. 2018) and EfficientNet (Tan and Le 2019)."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from mlsys_nimble.nets.blocks import Classifier, Net, conv_bn, image
from torch import Tensor, nn

Activation = Callable[[], nn.Module]
# kernel, stride, expansion, channels, blocks: table 2 of MobileNetV2, table 1 of EfficientNet
_MOBILENET_V2 = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (3, 2, 6, 32, 3),
    (3, 2, 6, 64, 4),
    (3, 1, 6, 96, 3),
    (3, 2, 6, 160, 3),
    (3, 1, 6, 320, 1),
)
_EFFICIENTNET = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class SqueezeExcite(nn.Module):
    """Gate of each channel, computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to the same shape."""
        result: Tensor = x * self.gate(x)
        return result


class InvertedResidual(nn.Module):
    """Block that expands, convolves each channel alone, gates (if asked) and projects; residual if the shape stays."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int,
        expansion: int,
        *,
        activation: Activation,
        squeezes: bool,
    ):
        super().__init__()
        width = in_channels * expansion
        parts = [conv_bn(in_channels, width, activation=activation)] if expansion != 1 else []
        parts.append(conv_bn(width, width, kernel, stride, groups=width, activation=activation))
        gate = [SqueezeExcite(width, max(1, in_channels // 4))] if squeezes else []
        self.body = nn.Sequential(*parts, *gate, conv_bn(width, out_channels, activation=None))
        self.is_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C', H', W']``."""
        y: Tensor = self.body(x)
        return x + y if self.is_residual else y


def _inverted(
    table: tuple[tuple[int, int, int, int, int], ...],
    *,
    width: float,
    depth: float,
    head: int,
    activation: Activation,
    squeezes: bool,
) -> nn.Module:
    channels = _round_channels(32 * width)
    parts: list[nn.Module] = [conv_bn(3, channels, 3, 2, activation=activation)]
    for kernel, first_stride, expansion, wanted, blocks in table:
        out_channels = _round_channels(wanted * width)
        for index in range(ceil(blocks * depth)):
            stride = first_stride if index == 0 else 1
            block = InvertedResidual(
                channels, out_channels, kernel, stride, expansion, activation=activation, squeezes=squeezes
            )
            parts.append(block)
            channels = out_channels
    out_channels = _round_channels(head * width)
    return nn.Sequential(*parts, conv_bn(channels, out_channels, activation=activation), Classifier(out_channels))


def _round_channels(channels: float) -> int:
    """Round to a multiple of eight, never down by more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def mobilenet_v2(batch: int = 1) -> Net:
    """Build MobileNetV2, 224 x 224."""
    module = _inverted(_MOBILENET_V2, width=1.0, depth=1.0, head=1280, activation=nn.ReLU6, squeezes=False)
    return Net(module, (image(batch, 224),))


def efficientnet_b0(batch: int = 1) -> Net:
    """Build EfficientNet-B0, 224 x 224."""
    module = _inverted(_EFFICIENTNET, width=1.0, depth=1.0, head=1280, activation=nn.SiLU, squeezes=True)
    return Net(module, (image(batch, 224),))


def efficientnet_b5(batch: int = 1) -> Net:
    """Build EfficientNet-B5, 456 x 456."""
    module = _inverted(_EFFICIENTNET, width=1.6, depth=2.2, head=1280, activation=nn.SiLU, squeezes=True)
    return Net(module, (image(batch, 456),))
