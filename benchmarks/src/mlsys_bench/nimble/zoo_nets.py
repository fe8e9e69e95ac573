"""Nets of the zoo's race that no library has, and what the libraries' nets need to be imported."""

from __future__ import annotations

import importlib.util
import random
from itertools import pairwise

import torch
from mlsys_nimble.nets.blocks import Classifier, Net, conv_bn, settle
from torch import Tensor, nn

_LIBRARY: list[torch.library.Library] = []


def let_torchvision_load() -> None:
    """Declare torchvision's ``nms`` where its compiled operators are of another torch; its nets do not call it."""
    if _LIBRARY or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _LIBRARY.append(library)


def tower() -> Net:
    """Return two towers that rank: 26 embedded categories and 13 numbers each, then their product of 64 numbers."""
    torch.manual_seed(0)
    return Net(_Towers().eval(), (torch.randint(0, 1000, (1, 26)), torch.randn(1, 13)))


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(26_000, 16)
        widths = (26 * 16 + 13, 256, 128, 64)
        parts = [[nn.Linear(a, b) for a, b in pairwise(widths)] for _ in range(2)]
        self.towers = nn.ModuleList(
            nn.Sequential(*(layer for linear in tower for layer in (linear, nn.ReLU()))) for tower in parts
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Map int64 ``[N, 26]`` and float32 ``[N, 13]`` to scores ``[N]``."""
        first = torch.arange(26, device=categories.device) * 1000
        x = torch.cat([self.table(categories + first).flatten(1), numbers], dim=1)
        scores: Tensor = (self.towers[0](x) * self.towers[1](x)).sum(1)
        return scores


def randwire() -> Net:
    """Return a randomly wired net (Xie et al. 2019): three stages of 16 separable nodes, WS(16, 4, .75), 224 x 224."""
    torch.manual_seed(0)
    return settle(Net(_RandWire(), (torch.randn(1, 3, 224, 224),)))


class _Node(nn.Module):
    """Weighted sum of the predecessors, ReLU, 3x3 separable convolution, batch norm."""

    def __init__(self, num_inputs: int, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(num_inputs))
        self.convolution = nn.Sequential(
            nn.Conv2d(in_channels, in_channels, 3, stride, 1, groups=in_channels, bias=False),
            conv_bn(in_channels, out_channels, activation=None),
        )

    def forward(self, inputs: list[Tensor]) -> Tensor:
        x = inputs[0]
        if len(inputs) > 1:
            x = torch.stack([each * w for each, w in zip(inputs, self.weights.sigmoid(), strict=True)]).sum(0)
        found: Tensor = self.convolution(torch.relu(x))
        return found


class _Stage(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, seed: int) -> None:
        super().__init__()
        self.before = _watts_strogatz(16, 4, 0.75, seed)
        self.ends = [node for node in range(16) if not any(node in before for before in self.before)]
        self.nodes = nn.ModuleList(
            _Node(max(1, len(before)), out_channels if before else in_channels, out_channels, 1 if before else 2)
            for before in self.before
        )

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for before, node in zip(self.before, self.nodes, strict=True):
            made.append(node([made[each] for each in before] or [x]))
        return torch.stack([made[end] for end in self.ends]).mean(0)


class _RandWire(nn.Sequential):
    def __init__(self) -> None:
        stem = (conv_bn(3, 39, 3, 2), conv_bn(39, 78, 3, 2, activation=None))
        stages = (_Stage(78, 78, 1), _Stage(78, 156, 2), _Stage(156, 312, 3))
        super().__init__(*stem, *stages, nn.ReLU(), conv_bn(312, 1280), Classifier(1280))


def _watts_strogatz(num_nodes: int, degree: int, p: float, seed: int) -> list[list[int]]:
    """Return each node's predecessors in a small-world graph (Watts, Strogatz 1998), edges from lower to higher."""
    draw = random.Random(seed)
    edges = set()
    for node in range(num_nodes):
        for step in range(1, degree // 2 + 1):
            end = (node + step) % num_nodes
            if draw.random() < p:
                free = [each for each in range(num_nodes) if each != node and _edge(node, each) not in edges]
                end = draw.choice(free)
            edges.add(_edge(node, end))
    return [sorted(a for a, b in edges if b == node) for node in range(num_nodes)]


def _edge(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def crepe() -> Net:
    """Return CREPE's tiny pitch tracker (Kim et al. 2018) on ten frames of 1,024 samples at 16 kHz."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = (1, 128, 16, 16, 16, 32, 64)
    for number, (before, after) in enumerate(pairwise(channels)):
        kernel, stride = (512, 4) if number == 0 else (64, 1)
        around = (254, 254) if number == 0 else (31, 32)
        parts = (nn.ConstantPad1d(around, 0.0), nn.Conv1d(before, after, kernel, stride), nn.ReLU())
        layers += [*parts, nn.BatchNorm1d(after), nn.MaxPool1d(2)]
    net = nn.Sequential(nn.Unflatten(1, (1, 1024)), *layers, nn.Flatten(), nn.Linear(256, 360), nn.Sigmoid())
    return settle(Net(net, (torch.randn(10, 1024),)))


def gcn() -> Net:
    """Return a graph convolutional net of two layers (Kipf, Welling 2017); nodes and edges as many as Cora's."""
    torch.manual_seed(0)
    num_nodes, num_edges = 2708, 10_556
    edges = torch.randint(0, num_nodes, (2, num_edges))
    return Net(_Graph(num_nodes).eval(), (torch.randn(num_nodes, 256), edges))


class _Graph(nn.Module):
    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.num_nodes = num_nodes
        self.layers = nn.ModuleList([nn.Linear(256, 16), nn.Linear(16, 7)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Map features ``[nodes, 256]`` and int64 edges ``[2, E]`` to log probabilities ``[nodes, 7]``."""
        source, target = edges[0], edges[1]
        ones = torch.ones(source.shape[0], dtype=x.dtype, device=x.device)
        degree = torch.ones(self.num_nodes, dtype=x.dtype, device=x.device).index_add(0, target, ones)
        scale = degree.rsqrt()
        weight = (scale[source] * scale[target])[:, None]
        for number, layer in enumerate(self.layers):
            h = layer(x)
            x = (h * (scale * scale)[:, None]).index_add(0, target, h[source] * weight)
            x = torch.relu(x) if number == 0 else x
        return torch.log_softmax(x, dim=1)
