"""NASNet-A (Zoph et al. 2017): mobile (4 @ 1056) and large (6 @ 4032), padded as TensorFlow's ``SAME`` does."""

from __future__ import annotations

from typing import Literal

import torch
from mlsys_nimble.nets.blocks import Classifier, Net, image
from torch import Tensor, nn
from torch.nn import functional

_EPS = 1e-3


class Squeeze(nn.Sequential):
    """Activation, 1 x 1 convolution and batch norm: the first step on each input of a cell."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(
            nn.ReLU(), nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels, eps=_EPS)
        )


class Separable(nn.Module):
    """Activation, depthwise and pointwise convolution, batch norm: all twice, the first time with the stride."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        padding = 0 if stride == 2 else kernel // 2
        self.first = nn.Sequential(
            nn.Conv2d(in_channels, in_channels, kernel, stride, padding, groups=in_channels, bias=False),
            nn.Conv2d(in_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels, eps=_EPS),
        )
        self.second = nn.Sequential(
            nn.Conv2d(out_channels, out_channels, kernel, 1, kernel // 2, groups=out_channels, bias=False),
            nn.Conv2d(out_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels, eps=_EPS),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C', H', W']``, H' = ceil(H / stride)."""
        x = functional.relu(x)
        if self.stride == 2:
            after = self.kernel // 2
            before = after - (1 if x.shape[-1] % 2 == 0 else 0)
            x = functional.pad(x, (before, after, before, after))
        result: Tensor = self.second(functional.relu(self.first(x)))
        return result


class Pool(nn.Module):
    """Pool over 3 x 3 windows; where an even size is halved, the first window begins at the first pixel."""

    def __init__(self, op: Literal["max", "average"], stride: int):
        super().__init__()
        self.op, self.stride = op, stride

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C, H', W']``, H' = ceil(H / stride)."""
        is_centred = self.stride == 1 or x.shape[-1] % 2 == 1
        padding, ceils = (1, False) if is_centred else (0, True)
        if self.op == "max":
            return functional.max_pool2d(x, 3, self.stride, padding, ceil_mode=ceils)
        return functional.avg_pool2d(x, 3, self.stride, padding, ceil_mode=ceils, count_include_pad=False)


class Halve(nn.Module):
    """Older input of a cell across a reduction: every second pixel, and the pixels between, convolved."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]`` to ``[N, C', ceil(H / 2), ceil(W / 2)]``."""
        x = functional.relu(x)
        shifted = functional.pad(x, (-1, 1, -1, 1))
        result: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return result


class NormalCell(nn.Module):
    """Cell of figure 4, left: five sums and the older input, six times ``channels``."""

    def __init__(self, newer: int, older: int, channels: int, *, halves_older: bool):
        super().__init__()
        self.newer = Squeeze(newer, channels)
        self.older = Halve(older, channels) if halves_older else Squeeze(older, channels)
        self.separables = nn.ModuleList(Separable(channels, channels, kernel, 1) for kernel in (5, 3, 5, 3, 3))
        self.pools = nn.ModuleList(Pool("average", 1) for _ in range(3))

    def forward(self, newer: Tensor, older: Tensor) -> Tensor:
        """Map two of ``[N, C, H, W]`` to ``[N, 6 * channels, H, W]``."""
        g, h = self.older(older), self.newer(newer)
        sums = [
            self.separables[0](h) + self.separables[1](g),
            self.separables[2](g) + self.separables[3](g),
            self.pools[0](h) + g,
            self.pools[1](g) + self.pools[2](g),
            self.separables[4](h) + h,
        ]
        return torch.cat([g, *sums], dim=1)


class ReductionCell(nn.Module):
    """Cell of figure 4, right: five sums, four of them the result. A stem's older input may have other channels."""

    def __init__(self, newer: int, older: nn.Module, older_channels: int, channels: int):
        super().__init__()
        self.newer, self.older = Squeeze(newer, channels), older
        self.separables = nn.ModuleList(
            [
                Separable(channels, channels, 5, 2),
                *(Separable(older_channels, channels, kernel, 2) for kernel in (7, 7, 5)),
                Separable(channels, channels, 3, 1),
            ]
        )
        self.pools = nn.ModuleList([Pool("max", 2), Pool("average", 2), Pool("average", 1), Pool("max", 2)])

    def forward(self, newer: Tensor, older: Tensor) -> Tensor:
        """Map two of ``[N, C, H, W]`` to ``[N, 4 * channels, ceil(H / 2), ceil(W / 2)]``."""
        g, h = self.older(older), self.newer(newer)
        first = self.separables[0](h) + self.separables[1](g)
        second = self.pools[0](h) + self.separables[2](g)
        third = self.pools[1](h) + self.separables[3](g)
        return torch.cat(
            [second, third, self.pools[2](first) + second, self.separables[4](first) + self.pools[3](h)], dim=1
        )


class NasNet(nn.Module):
    """Two stems that halve, then three rows of normal cells with a reduction between.

    With ``skips_reduction`` the cell after a reduction takes for its older input the one that the reduction took, as
    the authors' large net does (their parameter ``skip_reduction_layer_input``).
    """

    def __init__(self, stem_channels: int, channels: int, num_normal: int, *, skips_reduction: bool):
        super().__init__()
        self.skips_reduction = skips_reduction
        self.first = nn.Sequential(
            nn.Conv2d(3, stem_channels, 3, 2, bias=False), nn.BatchNorm2d(stem_channels, eps=_EPS)
        )
        quarter, half = channels // 4, channels // 2
        self.stem = ReductionCell(stem_channels, nn.Identity(), stem_channels, quarter)
        self.stem2 = ReductionCell(4 * quarter, Halve(stem_channels, half), half, half)
        cells: list[nn.Module] = []
        older, newer, was_halved = 4 * quarter, 4 * half, True
        for row in range(3):
            if row:
                reduction = ReductionCell(newer, Squeeze(older, 2 * channels), 2 * channels, 2 * channels)
                cells.append(reduction)
                channels *= 2
                older, newer, was_halved = newer, 4 * channels, True
            for _ in range(num_normal):
                cells.append(NormalCell(newer, older, channels, halves_older=was_halved))
                older, newer, was_halved = newer, 6 * channels, False
        self.cells = nn.ModuleList(cells)
        self.head = nn.Sequential(nn.ReLU(), Classifier(newer))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, H, W]`` to ``[N, 1000]``."""
        x = self.first(x)
        older = self.stem(x, x)
        newer = self.stem2(older, x)
        for cell in self.cells:
            skips = self.skips_reduction and isinstance(cell, ReductionCell)
            older, newer = (older if skips else newer), cell(newer, older)
        result: Tensor = self.head(newer)
        return result


def nasnet_mobile(batch: int = 1) -> Net:
    """Build NASNet-A mobile, 4 @ 1056, 224 x 224."""
    return Net(NasNet(stem_channels=32, channels=44, num_normal=4, skips_reduction=False), (image(batch, 224),))


def nasnet_large(batch: int = 1) -> Net:
    """Build NASNet-A large, 6 @ 4032, 331 x 331."""
    return Net(NasNet(stem_channels=96, channels=168, num_normal=6, skips_reduction=True), (image(batch, 331),))
