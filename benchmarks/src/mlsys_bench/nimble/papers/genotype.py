"""Nets of searched cells in the form of DARTS (Liu et al. 2018): DARTS itself, and AmoebaNet-A (Real et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mlsys_nimble.nets.blocks import Classifier, Net, conv_bn, image
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class CellGenotype:
    """Edges and results of a cell: two edges sum to a node; nodes 0 and 1 are the results of the two cells before."""

    edges: tuple[tuple[str, int], ...]  # (operation, the node it reads), two for each node from 2 on
    results: tuple[int, ...]  # nodes that are concatenated to the cell's result


_DARTS_NORMAL = CellGenotype(
    edges=(
        *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
        *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
        *(("sep_conv_3x3", 1), ("skip_connect", 0)),
        *(("skip_connect", 0), ("dil_conv_3x3", 2)),
    ),
    results=(2, 3, 4, 5),
)
_DARTS_REDUCTION = CellGenotype(
    edges=(
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("skip_connect", 2), ("max_pool_3x3", 1)),
        *(("max_pool_3x3", 0), ("skip_connect", 2)),
        *(("skip_connect", 2), ("max_pool_3x3", 1)),
    ),
    results=(2, 3, 4, 5),
)
_AMOEBANET_NORMAL = CellGenotype(
    edges=(
        *(("avg_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("sep_conv_3x3", 0), ("sep_conv_5x5", 2)),
        *(("sep_conv_3x3", 0), ("avg_pool_3x3", 3)),
        *(("sep_conv_3x3", 1), ("skip_connect", 1)),
        *(("skip_connect", 0), ("avg_pool_3x3", 1)),
    ),
    results=(4, 5, 6),
)
_AMOEBANET_REDUCTION = CellGenotype(
    edges=(
        *(("avg_pool_3x3", 0), ("sep_conv_3x3", 1)),
        *(("max_pool_3x3", 0), ("sep_conv_7x7", 2)),
        *(("sep_conv_7x7", 0), ("avg_pool_3x3", 1)),
        *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
        *(("conv_7x1_1x7", 0), ("sep_conv_3x3", 5)),
    ),
    results=(3, 4, 6),
)


class ReluConv(nn.Sequential):
    """Activation, convolutions, batch norm: the order of all operations of a cell."""

    def __init__(self, *convolutions: nn.Conv2d):
        super().__init__(nn.ReLU(), *convolutions, nn.BatchNorm2d(convolutions[-1].out_channels))


class FactorizedReduce(nn.Module):
    """Half-size reduction without losing pixels: two convolutions of stride 2, one of them shifted by a pixel."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, C, H, W]``, H and W even, to ``[N, C', H / 2, W / 2]``."""
        x = functional.relu(x)
        result: Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))
        return result


def _operation(name: str, channels: int, stride: int) -> nn.Module:
    if name == "skip_connect":
        return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)
    if name == "avg_pool_3x3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if name == "max_pool_3x3":
        return nn.MaxPool2d(3, stride, padding=1)
    if name == "conv_7x1_1x7":
        row = nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False)
        return ReluConv(row, nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False))
    kernel = int(name[-1])
    if name.startswith("dil_conv"):
        return ReluConv(*_separable(channels, kernel, stride, dilation=2))
    return nn.Sequential(ReluConv(*_separable(channels, kernel, stride)), ReluConv(*_separable(channels, kernel, 1)))


def _separable(channels: int, kernel: int, stride: int, dilation: int = 1) -> tuple[nn.Conv2d, nn.Conv2d]:
    padding = kernel // 2 * dilation
    each = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)
    return each, nn.Conv2d(channels, channels, 1, bias=False)


class Cell(nn.Module):
    """Cell built by its genotype; after a reduction it halves its older input first."""

    def __init__(
        self,
        genotype: CellGenotype,
        older: int,
        newer: int,
        channels: int,
        *,
        is_reduction: bool,
        follows_reduction: bool,
    ):
        super().__init__()
        self.older: nn.Module = (
            FactorizedReduce(older, channels)
            if follows_reduction
            else ReluConv(nn.Conv2d(older, channels, 1, bias=False))
        )
        self.newer = ReluConv(nn.Conv2d(newer, channels, 1, bias=False))
        self.genotype = genotype
        self.operations = nn.ModuleList(
            _operation(name, channels, 2 if is_reduction and node < 2 else 1) for name, node in genotype.edges
        )

    def forward(self, older: Tensor, newer: Tensor) -> Tensor:
        """Map two of ``[N, C, H, W]`` to ``[N, channels * len(genotype.results), H', W']``."""
        nodes = [self.older(older), self.newer(newer)]
        edges = [(operation, node) for operation, (_, node) in zip(self.operations, self.genotype.edges, strict=True)]
        for (left, left_node), (right, right_node) in zip(edges[::2], edges[1::2], strict=True):
            nodes.append(left(nodes[left_node]) + right(nodes[right_node]))
        return torch.cat([nodes[node] for node in self.genotype.results], dim=1)


class CellNet(nn.Module):
    """ImageNet net of DARTS: 14 cells, two of them reductions."""

    def __init__(self, normal: CellGenotype, reduction: CellGenotype, channels: int = 48, num_cells: int = 14):
        super().__init__()
        half = conv_bn(3, channels // 2, 3, 2)
        self.stem = nn.Sequential(*half, *conv_bn(channels // 2, channels, 3, 2, activation=None))
        self.stem2 = nn.Sequential(nn.ReLU(), *conv_bn(channels, channels, 3, 2, activation=None))
        cells: list[Cell] = []
        older = newer = channels
        follows_reduction = True  # the second stem halves too
        for index in range(num_cells):
            is_reduction = index in (num_cells // 3, 2 * num_cells // 3)
            channels *= 2 if is_reduction else 1
            genotype = reduction if is_reduction else normal
            cell = Cell(
                genotype, older, newer, channels, is_reduction=is_reduction, follows_reduction=follows_reduction
            )
            cells.append(cell)
            older, newer, follows_reduction = newer, channels * len(genotype.results), is_reduction
        self.cells = nn.ModuleList(cells)
        self.head = Classifier(newer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 224, 224]`` to ``[N, 1000]``."""
        older = self.stem(x)
        newer = self.stem2(older)
        for cell in self.cells:
            older, newer = newer, cell(older, newer)
        result: Tensor = self.head(newer)
        return result


def darts(batch: int = 1) -> Net:
    """Build DARTS, the second-order CIFAR genotype (figures 4 and 5 of its paper) at ImageNet's size, 224 x 224."""
    return Net(CellNet(_DARTS_NORMAL, _DARTS_REDUCTION), (image(batch, 224),))


def amoebanet(batch: int = 1) -> Net:
    """Build AmoebaNet-A's cells in the same net, 224 x 224."""
    return Net(CellNet(_AMOEBANET_NORMAL, _AMOEBANET_REDUCTION), (image(batch, 224),))
