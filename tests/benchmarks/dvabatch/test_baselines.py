"""The baselines against queueing theory, each other and their own definition; ``mlsys dvabatch baselines``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_bench.dvabatch.baselines import BaselineResult, Workload, compare_baselines, peak_rps
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest, SimulatedExecutor, simulate
from mlsys_core.loop.baselines import StaticBatch
from mlsys_core.workload import Poisson
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel, parse_stages

MODEL = parse_stages("4+0.5,4+0.5")


def by_policy(results: list[BaselineResult]) -> dict[str, BaselineResult]:
    return {result.policy: result for result in results}


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_request_at_a_time_is_the_m_d_1_queue(load: float):
    """Pollaczek and Khinchine: with service time D the mean sojourn is D + load * D / (2 (1 - load))."""
    service_s = 0.010
    model = StagedModel((LinearStage(service_s, 0.0),))
    workload = Workload(max_batch_size=1, num_requests=15_000)
    result = by_policy(compare_baselines(model, [load], workload=workload, window_s=0.0))["ZeroBatch"]
    assert result.point.latency.mean == pytest.approx(service_s * (1 + load / (2 * (1 - load))), rel=0.03)
    assert result.point.throughput_rps == pytest.approx(load / service_s, rel=0.03)


def test_a_window_of_zero_is_zero_batch():
    results = by_policy(compare_baselines(MODEL, [0.7], workload=Workload(num_requests=500), window_s=0.0))
    assert results["DelayBatch"].point == results["ZeroBatch"].point
    assert results["DelayBatch"].setting == "window 0 ms"


def test_a_long_window_makes_larger_batches_and_longer_waits_at_low_load():
    results = by_policy(compare_baselines(MODEL, [0.1], workload=Workload(num_requests=1000), window_s=0.050))
    assert results["DelayBatch"].mean_batch_size > 1.5 * results["ZeroBatch"].mean_batch_size
    assert results["DelayBatch"].point.latency.p50 > results["ZeroBatch"].point.latency.p50 + 0.020


def test_the_window_is_tuned_at_the_highest_load_and_kept():
    workload = Workload(num_requests=1000)
    tuned = [
        result for result in compare_baselines(MODEL, [0.3, 0.8], workload=workload) if result.policy == "DelayBatch"
    ]
    assert len({result.setting for result in tuned}) == 1
    means_s = []
    for divisor in (2, 4, 8, 16, 32):
        window_s = MODEL.seconds(64) / divisor
        (result,) = [
            r for r in compare_baselines(MODEL, [0.8], workload=workload, window_s=window_s) if r.policy == "DelayBatch"
        ]
        means_s.append(result.point.latency.mean)
    assert tuned[1].point.latency.mean == min(means_s)
    assert max(means_s) > 1.05 * min(means_s)  # else any choice would pass


@pytest.mark.parametrize("load", [0.2, 0.85])
def test_static_batch_has_the_best_size_that_keeps_up(load: float):
    workload = Workload(max_batch_size=24, num_requests=800, seed=5)
    result = by_policy(compare_baselines(MODEL, [load], workload=workload, window_s=0.0))["StaticBatch"]
    rate = load * peak_rps(MODEL, 24)
    times_s = Poisson(rate).times(800, np.random.default_rng(5))
    means_s = {}
    for size in (1, 2, 4, 8, 16, 24):
        if peak_rps(MODEL, size) > rate:
            executor = SimulatedExecutor(lambda batch: MODEL.seconds(batch.size), lambda batch: [None] * batch.size)
            trace = [(float(at_s), ServeRequest(str(number), None)) for number, at_s in enumerate(times_s)]
            requests = simulate(StaticBatch(batch_size=size), executor, trace).requests
            means_s[size] = sum(served.latency_s for served in requests) / len(requests)
    best = min(means_s, key=means_s.__getitem__)
    assert result.setting == f"size {best}"
    assert result.point.latency.mean == pytest.approx(means_s[best])


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0, 0.02), st.floats(1e-5, 0.01)), min_size=1, max_size=3),
    st.floats(0.05, 0.95),
    st.integers(1, 40),
    st.integers(2, 120),
    st.integers(0, 3),
)
def test_no_request_is_lost_or_faster_than_its_model(
    stages_s: list[tuple[float, float]], load: float, max_batch: int, num_requests: int, seed: int
):
    model = StagedModel(tuple(LinearStage(*times_s) for times_s in stages_s))
    workload = Workload(max_batch_size=max_batch, num_requests=num_requests, seed=seed)
    results = compare_baselines(model, [load], workload=workload)
    assert results == compare_baselines(model, [load], workload=workload)
    for result in results:
        assert result.point.latency.count == num_requests
        assert 1 <= result.mean_batch_size <= max_batch
        assert result.point.latency.p50 >= model.seconds(1) * (1 - 1e-9)
        assert result.point.throughput_rps <= peak_rps(model, max_batch) * (1 + 1e-9)


@pytest.mark.parametrize("loads", [[], [0.5, 1.0], [0.0], [-0.1], [math.nan]])
def test_loads_outside_the_peak_are_refused(loads: list[float]):
    with pytest.raises(InvalidInputError, match="part of the peak"):
        compare_baselines(MODEL, loads, workload=Workload())


@pytest.mark.parametrize("window_s", [-0.001, math.nan, math.inf])
def test_bad_windows_are_refused(window_s: float):
    with pytest.raises(InvalidInputError, match="0 or more seconds"):
        compare_baselines(MODEL, [0.5], workload=Workload(), window_s=window_s)


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"num_requests": 1}, {"seed": -1}])
def test_bad_workloads_are_refused(options: dict[str, int]):
    with pytest.raises(InvalidInputError, match="at least 1 request"):
        Workload(**options)


SHORT = ["dvabatch", "baselines", "--stage-ms", "4+0.5,2+0", "--requests", "200"]


def test_table(capsys: pytest.CaptureFixture[str]):
    assert run([*SHORT, "--load", "0.25,0.6"]) == 0
    out = capsys.readouterr().out
    for policy in ("ZeroBatch", "DelayBatch", "StaticBatch"):
        assert out.count(policy) == 2
    assert "Peak 1,684.2 req/s: batches of 64, 38 ms each" in out


def test_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "baselines.svg"
    options = ["--load", "0.5", "--window-ms", "3", "--max-batch", "8", "--seed", "7", "--json", "--plot", str(plot)]
    assert run([*SHORT, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"] == {"max_batch_size": 8, "num_requests": 200, "seed": 7}
    assert report["model"]["stages"] == [{"fixed_s": 0.004, "per_item_s": 0.0005}, {"fixed_s": 0.002, "per_item_s": 0}]
    zero, delay, static = report["results"]
    assert delay["setting"] == "window 3 ms"
    assert zero["point"]["offered_rps"] == pytest.approx(0.5 * 8 / 0.010)
    assert static["point"]["latency"]["count"] == 200
    assert "DelayBatch" in plot.read_text()


def test_the_seed_decides_the_arrivals(capsys: pytest.CaptureFixture[str]):
    averages = []
    for seed in ("1", "1", "2"):
        assert run([*SHORT, "--load", "0.5", "--seed", seed, "--json"]) == 0
        averages.append(json.loads(capsys.readouterr().out)["results"][0]["point"]["latency"]["mean"])
    assert averages[0] == averages[1] != averages[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stage-ms", "fast"], "'fast' in 'fast' is no stage"),
        (["--load", "0.5,high"], "write numbers with commas"),
        (["--load", "1.2"], "part of the peak"),
        (["--window-ms", "inf"], "0 or more seconds"),
        (["--plot", "x.gif"], "a figure cannot be written as 'x.gif'"),
        (["--max-batch", "0"], "Invalid value for '--max-batch'"),
    ],
)
def test_errors_are_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert run([*SHORT, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.strip().count("\n") == 0
