from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn

from tests.oracles.nimble_zoo.children import run_in_child
from tests.oracles.nimble_zoo.compare import TOLERANCE, Tally, distance, flat_tensors, swing


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

    notes, reason = run_in_child("net", run, 1)
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
