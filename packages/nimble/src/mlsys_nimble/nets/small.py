"""Nets bound by the number of their operators, not by arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_nimble.nets.blocks import Net


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
