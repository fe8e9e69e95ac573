"""A part of the oracle in ``make test``: modules whose names promise trouble, and some that are harmless."""

from __future__ import annotations

import itertools
import logging
import warnings

import pytest
from mlsys_dvabatch.stages import model as isolation

from tests.oracles.isolation.catalogue import cases
from tests.oracles.isolation.judge import by_cells, by_stages, judge
from tests.oracles.tally import Tally

# They mix over the first dimension, in training or always; draw random numbers; give one number for all; keep apart.
NAMES = (
    *("BatchNorm1d", "RNN", "GRU", "Softmax2d", "MultiheadAttention", "InstanceNorm1d", "FractionalMaxPool2d"),
    *("MSELoss", "NLLLoss", "Bilinear", "PReLU", "TransformerEncoderLayer", "Conv2d", "Embedding", "CircularPad1d"),
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", NAMES)
def test_modules_of_torch(name: str):
    """Each answer equals what the module gives that request alone, or the module is refused at load."""
    tally = Tally()
    for case in cases(1, names=(name,)):
        judge(tally, case, "stages", by_stages)
        judge(tally, case, "cells", by_cells)
    assert tally.counts.total() >= 2, "torch no longer has it"
    assert not tally.faults


def test_clients_of_triton():
    """60 requests at once over REST and gRPC: each gets its own answer, every ninth one that is not finite."""
    pytest.importorskip("tritonclient.grpc")
    pytest.importorskip("tritonclient.http")
    from tests.oracles.isolation.clients import many_clients

    tally = Tally()
    many_clients(tally, requests=60)
    assert not tally.faults
    assert tally.counts["equal"] == 60


def test_the_judge_sees_mixing(monkeypatch: pytest.MonkeyPatch):
    """Without the check, batch norm in training gives answers that follow their neighbours."""
    monkeypatch.setattr(isolation, "require_isolated", lambda *_, **__: None)
    monkeypatch.setattr(isolation, "require_followed", lambda *_, **__: None)
    tally = Tally()
    for case in itertools.islice(cases(1, (True,), names=("BatchNorm1d",)), 1):
        judge(tally, case, "stages", by_stages)
    assert tally.counts["wrong"] == 1
    assert "answers differ" in tally.faults[0]
