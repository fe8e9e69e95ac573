"""The benchmark's own machinery: real runs in virtual time give each request its own answer, under every case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mlsys_bench.dvabatch.cases import Costed, Outcome, Timed, run_case
from mlsys_bench.dvabatch.encoder import cases, check_equal, peak_table
from mlsys_bench.dvabatch.vision import VisionBench, at_load, buffer_pairs
from mlsys_bench.dvabatch.workloads import backlog, lengths_like, poisson_trace
from mlsys_core.errors import MlsysError
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.stages.profile import profile_stages
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig
from numpy.typing import NDArray
from torch import nn

TINY = BertConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, vocab_size=100, max_length=300)


def payload(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(length).integers(100, size=length)


def test_cases_answer_alike_on_a_model_that_runs():
    torch.manual_seed(0)
    padded = BertStages(TINY, 2).eval()
    packed = padded.with_form(is_packed=True, num_stages=1)
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) * 1e-3  # each batch takes one tick: times are equal in every run

    trace = poisson_trace(200.0, lengths_like("RTE", 16), payload)
    outcomes: list[Outcome] = []
    for case in cases(0.01):
        model = packed if case.name == "token-packed" else padded
        costs = profile_stages(model, payload, batch_sizes=(1, 4), lengths=(8, 64), repeats=1)
        outcome = run_case(case, Timed(StageRunner(model), costs, clock=clock), trace)
        assert len(outcome.latencies_s) == 16
        assert min(outcome.latencies_s) > 0
        outcomes.append(outcome)
    check_equal(outcomes)
    assert len(peak_table({"RTE": outcomes}).rows[0]) == 1 + len(outcomes)
    outcomes[1].results["3"] = outcomes[1].results["3"] + 0.1
    with pytest.raises(MlsysError, match="differ by"):
        check_equal(outcomes)


def test_a_backlog_is_served_at_the_peak():
    costs = parse_stages("1+1,1+1")
    outcome = run_case(cases(0.0)[0], Costed(costs), backlog([1] * 128, lambda _: None))
    assert outcome.throughput_rps == pytest.approx(costs.peak_rps(64))


def test_vision_cases():
    program = program_of(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    bench = VisionBench("small", program, parse_stages("2+0.5,2+0.5,2+0.5"))
    outcomes = at_load(bench, 0.6, num=80, window_s=0.01)
    assert [outcome.case for outcome in outcomes][:2] == ["ZeroBatch", "DelayBatch"]
    assert outcomes[2].mean_s <= outcomes[0].mean_s
    assert set(buffer_pairs(bench, num=40)) == {1, 2, 3, 4}
