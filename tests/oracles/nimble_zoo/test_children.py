from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn

from tests.oracles.nimble_zoo.children import run_in_child
from tests.oracles.nimble_zoo.compare import TOLERANCE, Tally, distance, flat_tensors, swing
from tests.oracles.nimble_zoo.vision import settle


def test_a_model_that_ends_tells_its_cases():
    def run(tally: Tally) -> str | None:
        tally.note("net, prepare", "equal")
        return "the rest is too large"

    notes, reason = run_in_child("net", run, 20)
    assert [note[:2] for note in notes] == [("net, prepare", "equal")]
    assert reason == "the rest is too large"


def test_a_process_that_dies_is_a_fault():
    def run(tally: Tally) -> str | None:
        tally.note("net, prepare", "equal")
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    notes, reason = run_in_child("net", run, 20)
    assert [note.outcome for note in notes] == ["equal", "raw"]
    assert reason is None


def test_a_model_without_end_is_named_as_not_run():
    def run(tally: Tally) -> str | None:
        while True:
            pass

    notes, reason = run_in_child("net", run, 1, patience=1800)
    assert notes == []
    assert reason is not None
    assert "1 s of processor time" in reason


class Ranked(nn.Module):
    """The larger of two numbers that only rounding tells apart, or of two that differ."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[0] > x[1], 1.0, -1.0)


def test_only_ties_swing():
    for second, swings in ((1.0, True), (0.9, False)):
        call = {"args": (torch.tensor([1.0, second]),)}
        expected = [flat_tensors(Ranked()(*call["args"]))]
        assert (swing(Ranked(), [call], expected) > TOLERANCE) is swings
    assert distance({"0": torch.ones(2)}, {"0": torch.ones(3)}) == float("inf")


class Detector(nn.Module):
    """A net whose signal fades, as untrained detection nets' do."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
        self.body = nn.Sequential(*layers)
        self.cls_logits = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cls_logits(self.body(x))


def test_scores_of_a_settled_net_lie_far_apart():
    torch.manual_seed(0)
    net = Detector().eval()
    with torch.no_grad():
        for layer in net.body[::3]:
            layer.weight.mul_(0.1)
    call = {"args": (torch.rand(1, 16, 8, 8),)}
    assert net(*call["args"]).flatten(2).std(2).max() < 1e-3
    settle(net, call)
    for image in (*call["args"], torch.rand(1, 16, 8, 8)):
        scores = net(image)
        assert 0.5 < scores.std() < 2
        assert len(scores.unique()) == scores.numel()
