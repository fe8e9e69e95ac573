"""Kernels are measured on inputs that live until all are measured: make sanitize once found reads of freed memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.decisions import Measuring
from mlsys_nimble.backends.cpu.replay import Slots
from torch import nn


def test_sample_inputs_live_while_kernels_are_measured(monkeypatch: pytest.MonkeyPatch):
    bound: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    bind, measure = Slots.bind, Measuring._measured

    def watched_bind(self: Slots, inputs: Any) -> list[torch.Tensor]:
        kept = bind(self, inputs)
        bound.extend(weakref.ref(tensor) for tensor in kept)
        return kept

    def watched_measure(self: Measuring, segments: Any) -> dict[int, float]:
        seconds = measure(self, segments)
        alive.extend(each() is not None for each in bound)
        return seconds

    monkeypatch.setattr(Slots, "bind", watched_bind)
    monkeypatch.setattr(Measuring, "_measured", watched_measure)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    Nimble(net).prepare((torch.zeros(2, 8),))
    assert alive
    assert all(alive)
