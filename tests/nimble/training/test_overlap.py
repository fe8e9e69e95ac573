"""Gradients through results whose elements share memory; AOTAutograd's own are wrong."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.training.state import overlaps
from torch import Tensor, nn


class Windows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled.unfold(0, 3, 1), doubled.as_strided((4, 2), (2, 1))


@pytest.mark.parametrize("way", ["prepare", "compile"])
def test_every_window_counts(way: str):
    net = Windows()
    x = torch.arange(8.0, requires_grad=True)
    model = torch.compile(net, backend="nimble") if way == "compile" else Nimble(net).prepare(x, training=True)
    found = []
    for run in (model, net):
        first, second = run(x)
        ((first * torch.arange(18.0).view(6, 3)).sum() + (second * 5).sum()).backward()
        found.append((first.detach(), second.detach(), x.grad))
        x.grad = None
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(("shape", "stride", "expected"), [
    ((5, 2), (1, 1), True), ((5, 2), (2, 1), False), ((2, 5), (1, 2), False), ((3, 6), (0, 1), False),
    ((1, 4), (1, 1), False), ((3, 3, 3), (3, 1, 2), True), ((), (), False),
])  # fmt: skip
def test_which_overlap(shape: tuple[int, ...], stride: tuple[int, ...], expected: bool):
    assert overlaps(torch.empty(64).as_strided(shape, stride)) == expected
