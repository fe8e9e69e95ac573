"""The race over sizes: its speech net serves any number of frames from one preparation."""

from __future__ import annotations

import torch
from mlsys_bench.harness.race import Outcome
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


def test_the_report_has_the_losses_first():
    def timed(seconds: float) -> Outcome:
        return Outcome("timed", "", 0.0, 1.0, ((seconds,) * 3,))

    races = {
        "net, 1": {"Nimble": timed(0.001), "OpenVINO": timed(0.002)},
        "net, 8": {"Nimble": timed(0.004), "OpenVINO": timed(0.002)},
    }
    section = sizes.report(races, 2, {"net": "quiet"})
    assert [list(row) for row in section.body[0].rows] == [
        ["net", "8", "OpenVINO", "2", "4", "0.50x"],
        ["net", "1", "OpenVINO", "2", "1", "2.00x"],
    ]
    assert section.data["over_best_peer"] == 1.0
