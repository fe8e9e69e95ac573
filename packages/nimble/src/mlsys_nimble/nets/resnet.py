"""Residual nets (He et al. 2015): ResNet-50 and -101 for ImageNet, ResNet-20 for CIFAR."""

from __future__ import annotations

from torch import Tensor, nn

from mlsys_nimble.nets.blocks import Classifier, Net, conv_bn, image


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
