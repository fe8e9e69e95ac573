"""The paper's evaluation: what a curve says at a latency, the cluster's costs, and both back ends end to end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_bench.orca import paper_engine, paper_simulated
from mlsys_bench.orca.paper import Case, Curve, crossing, paper_workload, throughput_at
from mlsys_bench.orca.paper_simulated import Cluster, Gpt, Gpu
from mlsys_bench.orca.paper_suite import run_engine, run_simulated
from mlsys_bench.orca.serve import Workload
from mlsys_bench.workload.lengths import Constant, Uniform
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from rich.console import Console


def curve(case: Case, *points: tuple[float, float]) -> Curve:
    """Make points from (requests per second, median seconds per token)."""
    return Curve(
        case,
        tuple(
            LoadPoint(
                offered_rps=rps,
                throughput_rps=rps,
                latency=LatencySummary.of([1.0]),
                normalized_latency=LatencySummary.of([latency_s]),
            )
            for rps, latency_s in points
        ),
    )


def batch_of(*parts: tuple[int, int]) -> IterationBatch:
    """Requests as (tokens computed before, tokens to run)."""
    builder = BatchBuilder()
    for number, (num_computed, num_tokens) in enumerate(parts):
        builder.add(
            str(number),
            [0] * num_tokens,
            num_computed_tokens=num_computed,
            block_table=(0,),
            sampling=SamplingParams(),
        )
    return builder.build()


def test_throughput_at_a_latency_is_read_between_runs() -> None:
    points = curve(Case("orca", 8), (1.0, 0.1), (2.0, 0.1), (4.0, 0.5)).points
    assert throughput_at(points, 0.3) == pytest.approx(3.0)
    assert throughput_at(points, 0.05) is None
    assert throughput_at(points, 9.0) == 4.0, "a curve that stays below ends with its highest"


def test_the_ratio_compares_the_best_of_each() -> None:
    curves = [
        curve(Case("orca", 1), (1.0, 0.1), (2.0, 0.3)),
        curve(Case("orca", 8), (1.0, 0.1), (6.0, 0.2)),
        curve(Case("request-level", 8, 4), (0.5, 0.1), (1.0, 0.4)),
    ]
    at = crossing(curves, 0.2)
    assert at.orca == ("orca(8)", 6.0)
    assert at.request_level == ("request-level(8, 4)", pytest.approx(0.5 + 0.5 / 3))
    assert at.ratio == pytest.approx(9.0)
    assert crossing(curves[:2], 0.2).ratio is None
    slowed = crossing(curves, 0.2, baseline_slowdown=2.0)
    assert slowed.orca == at.orca
    assert slowed.request_level[1] == pytest.approx(0.25), "at 0.1 s they did 0.5 requests per second"


def test_scaled_lengths() -> None:
    workload = paper_workload(scale=1, num_requests=4)
    assert (workload.prompts, workload.outputs) == (Uniform(32, 512), Uniform(1, 128))
    workload = paper_workload(scale=1 / 32, num_requests=4)
    assert (workload.prompts, workload.outputs) == (Uniform(1, 16), Uniform(1, 4))
    with pytest.raises(InvalidInputError, match="scale of the lengths is 0"):
        paper_workload(scale=0, num_requests=4)


def test_the_cluster_holds_what_it_should() -> None:
    cluster = Cluster()
    assert cluster.model.num_parameters == pytest.approx(175e9, rel=0.01)
    # 16 x 36 GB less 350 GB of parameters, over 4.7 MB a token.
    assert cluster.num_kv_tokens == pytest.approx((576e9 - 350e9) / (2 * 96 * 12288 * 2), rel=0.01)


def test_iterations_cost_what_the_roofline_says() -> None:
    """One GPU, no overheads: a decode reads the weights once, a large prefill is arithmetic, attention reads K/V."""
    gpu = Gpu(flops_per_s=1e12, bytes_per_s=1e11, flops_share=1, bytes_share=1, network_bytes_per_s=1e18)
    model = Gpt(num_layers=4, hidden_size=1000, vocab_size=1)
    cluster = Cluster(model=model, gpu=gpu, num_stages=1, gpus_per_stage=1)
    weights_s = 4 * 12 * 1000**2 * 2 / 1e11
    context_s = 4 * 2 * 101 * 1000 * 2 / 1e11
    assert cluster.iteration_s(batch_of((100, 1))) == pytest.approx(weights_s + context_s, rel=1e-3)
    together = cluster.iteration_s(batch_of((100, 1), (100, 1)))
    assert together == pytest.approx(weights_s + 2 * context_s, rel=1e-3), "the weights are read once for both"
    arithmetic_s = 4 * (24 * 1000**2 * 512 + 4 * 1000 * 512**2) / 1e12
    assert cluster.iteration_s(batch_of((0, 512))) == pytest.approx(arithmetic_s, rel=1e-3)


def test_more_gpus_share_the_work_and_must_agree() -> None:
    one, eight = (Cluster(gpus_per_stage=number).iteration_s(batch_of((0, 256))) for number in (1, 8))
    assert one / 8 < eight < one
    free = Cluster(gpu=Gpu(allreduce_latency_s=0, link_bytes_per_s=1e18, network_bytes_per_s=1e18))
    alone = Cluster(gpus_per_stage=1, gpu=Gpu(network_bytes_per_s=1e18))
    assert free.iteration_s(batch_of((0, 256))) == pytest.approx(alone.iteration_s(batch_of((0, 256))) / 8)
    assert sum(stage(batch_of((5, 1))) for stage in free.stages()) == free.iteration_s(batch_of((5, 1)))


def test_a_lone_simulated_request_takes_what_its_iterations_cost() -> None:
    cluster = Cluster()
    workload = Workload(prompts=Constant(272), outputs=Constant(64), num_requests=1)
    registry = installed_plugins().registry
    point = paper_simulated.simulate_point(Case("orca", 8), workload, cluster, rate=1.0, registry=registry)
    costs = [cluster.iteration_s(batch_of((0, 272))), *(cluster.iteration_s(batch_of((272 + i, 1))) for i in range(63))]
    assert point.latency.p50 == pytest.approx(sum(costs))
    assert point.normalized_latency.p50 == pytest.approx(sum(costs) / 64)


def test_the_papers_result_comes_out_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order of magnitude at equal latency, larger batches no worse for Orca, (1, 1) the baseline's best."""
    cases = (Case("orca", 8), Case("orca", 32), *paper_simulated.CASES[4:7])
    monkeypatch.setattr(paper_simulated, "CASES", cases)
    monkeypatch.setattr(paper_simulated, "RATE_FACTOR", 2.0)
    context = BenchContext(Console(file=io.StringIO()), is_quick=True, device="cpu", num_threads=1)
    section = run_simulated(context, num_requests=40)
    at = section.data["crossings"]["the paper's"]
    assert at["ratio"] > 10
    assert at["orca"][0] == "orca(32)"
    assert at["request_level"][0] == "request-level(1, 1)"


def test_the_real_engine_replays_the_trace(make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_engine, "QUICK_CASES", (Case("orca", 4), Case("request-level", 4)))
    loaded = load_model(make_gguf(), dtype="fp32", backend="torch")
    context = BenchContext(Console(file=io.StringIO()), is_quick=True, device="cpu", num_threads=1)
    section = run_engine(loaded, context, scale=0.05, num_requests=4)
    assert section.status == "ok"
    assert section.data["num_wrong"] == 0
    assert {label: len(points) for label, points in section.data["heterogeneous"].items()} == {
        "orca(4)": len(paper_engine.QUICK_LOADS),
        "request-level(4, 4)": len(paper_engine.QUICK_LOADS),
    }
    assert section.data["alone_s"] > 0
    assert set(section.data["crossings"]) == {"twice that of a request alone"}
