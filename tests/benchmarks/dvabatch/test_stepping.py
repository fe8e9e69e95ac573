"""The paper's stepping load, scaled: rates, runs and what is written of them."""

from __future__ import annotations

import json

import pytest
import torch
from mlsys_bench.dvabatch.cases import Case, Costed, delay_batch
from mlsys_bench.dvabatch.stepping import BEYOND, PAPER_RPS, Stepping, record, scaled_rates, serve_rising
from mlsys_bench.dvabatch.vision import VisionBench, stepping
from mlsys_bench.dvabatch.workloads import GLUE_LIKE, stepping_trace
from mlsys_dvabatch.scheduling.policies.input import InputPolicy
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from torch import nn


def test_rates_are_the_papers_in_proportion():
    assert PAPER_RPS[0] == 66
    assert PAPER_RPS[-1] == 4000
    assert (len(PAPER_RPS) - 1) * 2000 == 30_000
    rates = scaled_rates(80.0)
    assert rates[-1] == pytest.approx(BEYOND * 80)
    assert [rate / rates[-1] for rate in rates] == pytest.approx([rate / 4000 for rate in PAPER_RPS])


def test_each_step_has_its_number_of_requests_and_its_rate():
    trace = stepping_trace((10.0, 100.0), 500, "RTE")
    times = [at for at, _ in trace]
    assert times == sorted(times)
    assert len({request.request_id for _, request in trace}) == 1000
    assert [500 / times[499], 500 / (times[999] - times[499])] == pytest.approx([10, 100], rel=0.2)
    of = GLUE_LIKE["RTE"]
    assert all(of.least <= request.length <= of.most for _, request in trace)
    assert {request.length for _, request in stepping_trace((10.0,), 5)} == {1}


def test_a_load_rises_in_one_run_until_requests_take_too_long():
    program = program_of(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    bench = VisionBench("small", program, parse_stages("2+0.5,2+0.5,2+0.5"))
    runs = stepping(bench, 0.01, num_per_step=8)
    assert list(runs) == ["DelayBatch", "DVABatch"]
    for run in runs.values():
        assert len(run.latencies_s) == 16 * 8
        assert run.rates[-1] == pytest.approx(BEYOND * bench.peak_rps)
        assert run.highest_rps(100.0) == run.rates[-1] > run.highest_rps(0.02)


def test_what_is_written_has_every_step_in_both_scales():
    policy = Case("Policy I", InputPolicy)
    subject, peak_rps = Costed(parse_stages("2+0.5,2+0.5")), 500.0
    runs = {
        case.name: serve_rising(case, subject, peak_rps, num_per_step=10, workload="SST-2")
        for case in (delay_batch(0.005), policy)
    }
    written = json.loads(json.dumps(record(runs, qos_s=100.0)))
    assert written["rates_rps"] == pytest.approx([rate * written["scale"] for rate in written["paper_rps"]])
    for name, run in runs.items():
        case = written["cases"][name]
        assert len(case["mean_s"]) == len(case["p99_s"]) == 16
        assert case["mean_s"][0] == pytest.approx(sum(run.latencies_s[:10]) / 10)
        assert case["highest_rps"] == written["rates_rps"][-1]
        assert case["highest_paper_rps"] == pytest.approx(4000)


def test_the_highest_load_is_that_before_the_first_bad_step():
    run = Stepping((1.0, 2.0, 3.0), 2, (0.1, 0.1, 0.1, 0.9, 0.1, 0.1))
    assert [run.highest_rps(qos_s) for qos_s in (1.0, 0.5, 0.05)] == [3.0, 1.0, 0.0]
