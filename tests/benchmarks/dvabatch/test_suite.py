"""The suite on models made up here: virtual time, gains by policies, lengths, rising loads, options."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_bench.dvabatch.cases import (
    Case,
    Costed,
    Outcome,
    Timed,
    best_static,
    capped,
    run_case,
    zero_batch,
)
from mlsys_bench.dvabatch.encoder import cases, check_equal, peak_table
from mlsys_bench.dvabatch.vision import VisionBench, at_load
from mlsys_bench.dvabatch.workloads import (
    GLUE_LIKE,
    LIKE,
    backlog,
    lengths_like,
    poisson_trace,
)
from mlsys_core.cli.main import run as mlsys
from mlsys_core.errors import MlsysError
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.scheduling.costs import least_request_s, remaining_s
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.planner import Planner
from mlsys_dvabatch.stages.profile import profile_stages
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig
from numpy.typing import NDArray

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
    assert outcome.throughput_rps == pytest.approx(64 / costs.seconds(64))


def test_vision_cases():
    bench = VisionBench("small", parse_stages("2+0.5,2+0.5,2+0.5"))
    outcomes = at_load(bench, 0.6, num=80, window_s=0.01)
    assert [outcome.case for outcome in outcomes][:2] == ["ZeroBatch", "DelayBatch"]
    assert outcomes[2].mean_s <= outcomes[0].mean_s


MIXED = parse_stages("4+0.1,1+1,1+1,1+1")


@pytest.mark.parametrize("load", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("stages_ms", ["4+0.1,1+1,1+1,1+1", "0.2+2,0.2+2,0.2+2,0.2+2", "6+0.05,6+0.05,6+0.05,6+0.05"])
def test_cost_aware_policies_are_hardly_ever_worse_than_zero_batch(stages_ms: str, load: float):
    """In the costs' own world: at most 5 % worse than ZeroBatch, whatever the shape; the literal rule is up to 3x."""
    costs = parse_stages(stages_ms)
    rate = load * 64 / remaining_s(costs, 0, 64)
    trace = poisson_trace(rate, [1] * 800, lambda _: None)
    zero = run_case(zero_batch(), Costed(costs), trace)
    for policy in (LoadOperatorPolicy, LoadPolicy):
        assert run_case(Case("DVABatch", policy), Costed(costs), trace).mean_s <= 1.05 * zero.mean_s
    assert best_static(Costed(costs), trace).mean_s <= zero.mean_s


@pytest.mark.parametrize("size", [16, 64])
def test_its_mean_is_no_more_than_that_of_batches_as_they_come(size: int):
    """Simulated for 20,000 requests, which leaves an error of a few percent."""
    planned = Planner(MIXED, 64, 0.7 / least_request_s(MIXED, 64))
    trace = poisson_trace(planned.rate, [1] * 20_000, lambda _: None)
    assert planned.mean_s <= 1.05 * run_case(capped(size), Costed(MIXED), trace).mean_s


SEEDS = st.integers(0, 2**32 - 1)
WITHIN = 0.15  # of the published mean; 2,000 draws of the widest sampler vary by 3 % themselves


@given(name=st.sampled_from(sorted(LIKE)), seed=SEEDS)
def test_lengths_have_the_published_mean_and_the_samplers_median(name: str, seed: int):
    of, lengths = LIKE[name], lengths_like(name, 2000, seed)
    assert of.least <= min(lengths) <= max(lengths) <= of.most
    assert abs(np.median(lengths) - of.median) <= max(1.0, 0.15 * of.median)
    if of.mean is not None:
        assert np.mean(lengths) == pytest.approx(of.mean, rel=WITHIN)


@given(name=st.sampled_from(sorted(LIKE)), most=st.integers(8, 512), seed=SEEDS)
def test_no_length_is_above_what_a_model_takes(name: str, most: int, seed: int):
    if most >= LIKE[name].least:
        assert max(lengths_like(name, 200, seed, most)) <= most


def test_sst_2_is_more_diverse_than_mrpc():
    """The paper's section 8.4 says so, and explains with it which set gains more."""
    spread = {name: np.std(lengths_like(name, 2000)) / np.mean(lengths_like(name, 2000)) for name in GLUE_LIKE}
    assert spread["SST-2"] > 2 * spread["MRPC"]
    assert min(spread, key=spread.__getitem__) == "MRPC"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["part=audio"], "give one of all, encoder, vision"),
        (["lengths=RTE,GLUE"], "lengths=GLUE: give some of CoLA"),
    ],
)
def test_options_are_refused_in_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert mlsys(["bench", "dvabatch", *options]) == 2
    assert says in capsys.readouterr().err
