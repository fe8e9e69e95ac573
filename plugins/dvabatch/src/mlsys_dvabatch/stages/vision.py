"""U-Net, LinkNet, VGG-19 and ResNet-152 shapes, with random weights (DVABatch, Table 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def _block(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Encoder and decoder with skip connections; ``[n, 3, h, w]`` to ``[n, 2, h, w]``, h and w multiples of 16."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        ends = zip([3, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(nn.Sequential(_block(i, o), _block(o, o)) for i, o in ends)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.join = nn.ModuleList(nn.Sequential(_block(2 * w, w), _block(w, w)) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Run the network; shapes are the class's."""
        kept = []
        for level, down in enumerate(self.down):
            image = down(functional.max_pool2d(image, 2) if level else image)
            kept.append(image)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            image = join(torch.cat((up(image), skip), 1))
        return torch.as_tensor(self.head(image))


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _block(inputs, outputs, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        is_plain = stride == 1 and inputs == outputs
        self.skip: nn.Module = nn.Identity() if is_plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.skip(x))


class LinkNet(nn.Module):
    """ResNet-18-like encoder, thin decoder with sums; ``[n, 3, h, w]`` to ``[n, 2, h, w]``, multiples of 32."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(_block(3, width, kernel=7, stride=2), nn.MaxPool2d(2))
        self.down = nn.ModuleList(
            nn.Sequential(_BasicBlock(i, o, 1 if level == 0 else 2), _BasicBlock(o, o, 1))
            for level, (i, o) in enumerate(zip([width, *widths[:-1]], widths, strict=True))
        )
        ends = list(zip(widths[::-1], [*widths[-2::-1], width], strict=True))
        self.up = nn.ModuleList(self._decoder(i, o, 2 if level < 3 else 1) for level, (i, o) in enumerate(ends))
        self.head = nn.Sequential(
            nn.ConvTranspose2d(width, width // 2, 2, 2), nn.ReLU(), nn.ConvTranspose2d(width // 2, 2, 2, 2)
        )

    @staticmethod
    def _decoder(inputs: int, outputs: int, scale: int) -> nn.Sequential:
        middle = inputs // 4
        grow = nn.ConvTranspose2d(middle, middle, scale, scale)
        return nn.Sequential(_block(inputs, middle, kernel=1), grow, nn.ReLU(), _block(middle, outputs, kernel=1))

    def forward(self, image: Tensor) -> Tensor:
        """Run the network; shapes are the class's."""
        image = self.stem(image)
        kept = []
        for down in self.down:
            image = down(image)
            kept.append(image)
        for up, skip in zip(self.up, [*kept[-2::-1], None], strict=True):
            image = up(image) if skip is None else up(image) + skip
        return torch.as_tensor(self.head(image))


class VGG19(nn.Module):
    """Sixteen convolutions and three wide linear layers; ``[n, 3, size, size]`` to ``[n, classes]``."""

    def __init__(self, size: int = 224, *, width: int = 64, num_classes: int = 1000, hidden: int = 4096) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for level, repeats in enumerate((2, 2, 4, 4, 4)):
            outputs = width << min(level, 3)
            for _ in range(repeats):
                layers.append(_block(inputs, outputs))
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        flat = inputs * (size // 32) ** 2
        self.classifier = nn.Sequential(
            nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        """Run the network; shapes are the class's."""
        return torch.as_tensor(self.classifier(self.features(image).flatten(1)))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.body = nn.Sequential(
            _block(inputs, middle, kernel=1),
            _block(middle, middle, stride=stride),
            nn.Conv2d(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        is_plain = stride == 1 and inputs == outputs
        self.skip: nn.Module = nn.Identity() if is_plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


class ResNet152(nn.Module):
    """Bottleneck blocks 3, 8, 36, 3; ``[n, 3, size, size]`` to ``[n, classes]``."""

    def __init__(self, *, width: int = 64, num_classes: int = 1000, depths: tuple[int, ...] = (3, 8, 36, 3)) -> None:
        super().__init__()
        layers: list[nn.Module] = [_block(3, width, kernel=7, stride=2), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for level, depth in enumerate(depths):
            middle = width << level
            for number in range(depth):
                layers.append(_Bottleneck(inputs, middle, 2 if level and not number else 1))
                inputs = 4 * middle
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Run the network; shapes are the class's."""
        return torch.as_tensor(self.head(self.features(image).mean((2, 3))))


# name -> (model with random weights, shape of one input); sizes small enough to be measured on two cores
SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(16), (3, 96, 96)),
    "linknet": (lambda: LinkNet(32), (3, 128, 128)),
    "vgg19": (lambda: VGG19(64), (3, 64, 64)),
    "vgg19-weights": (lambda: VGG19(32, width=16), (3, 32, 32)),
    "resnet152": (lambda: ResNet152(width=32), (3, 64, 64)),
}
"""``vgg19-weights`` is a VGG-19 whose linear layers outweigh its convolutions: a batch costs little more than one."""
