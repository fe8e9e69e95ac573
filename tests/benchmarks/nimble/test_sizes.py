"""The race over sizes: its speech net serves any number of frames from one preparation."""

from __future__ import annotations

import torch
from mlsys_bench.nimble import sizes, zoo_nets
from mlsys_nimble import Nimble


def test_frames_of_sound_from_one_preparation():
    span = sizes.RANGES[sizes.CREPE]
    net = zoo_nets.crepe()
    model = Nimble(net.module).prepare(net.inputs, dynamic={0: {span.dim: ("size", span.least, span.most)}})
    for size in (1, 3, 40):
        inputs = sizes.at_size(net.inputs, span, size)
        with torch.no_grad():
            torch.testing.assert_close(model(*inputs), net.module(*inputs), atol=1e-5, rtol=1e-4)
    assert model.prepared is not None
    assert type(model.prepared.executor).__name__ == "RangedExecutor"
