"""Simulated fleets: all requests are served, the same run twice is the same, and the router keeps prompts together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlsys_bench.orca.replicas_simulated import MEASURED_S, Traffic, iteration_s, run_fleet
from mlsys_core.cli.main import run
from mlsys_core.plugins import installed_plugins
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch

TRAFFIC = Traffic(num_requests=60, rate=16.0, num_groups=16, output_tokens=(4, 12))


def batch(num_tokens: int) -> IterationBatch:
    builder = BatchBuilder()
    builder.add("a", [0] * num_tokens, num_computed_tokens=0, block_table=(0,), sampling=None)
    return builder.build()


def test_an_iteration_takes_what_was_measured_and_lines_between() -> None:
    for tokens, seconds in MEASURED_S:
        assert iteration_s(batch(tokens)) == pytest.approx(seconds)
    times = [iteration_s(batch(tokens)) for tokens in (1, 3, 8, 30, 64, 100, 256, 400)]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["paged", "chunked"])
def test_the_router_computes_less_of_the_prompts_than_turns_do(policy: str) -> None:
    registry = installed_plugins().registry
    fleet, again, turns = (
        run_fleet(8, TRAFFIC, policy=policy, router=router, registry=registry)  # type: ignore[arg-type]
        for router in ("fleet", "fleet", "round robin")
    )
    assert fleet.latencies_s == again.latencies_s
    assert len(fleet.latencies_s) == len(turns.latencies_s) == 60
    assert fleet.kept_share > turns.kept_share + 0.1
    assert fleet.latency.mean < turns.latency.mean


def test_the_suite_writes_json_and_a_figure(tmp_path: Path) -> None:
    arguments = ["orca-replicas", "replicas=1,3", "requests=2", "--output", str(tmp_path)]
    assert run(["bench", *arguments]) == 0
    results = json.loads((tmp_path / "orca-replicas.json").read_text())["results"]
    assert [(each["num_replicas"], each["router"]) for each in results["runs"]] == [
        (1, "fleet"),
        (1, "round robin"),
        (3, "fleet"),
        (3, "round robin"),
    ]
    assert (tmp_path / "orca-replicas.svg").exists()


@pytest.mark.parametrize("text", ["0", "1,x", "1001", ","])
def test_numbers_of_replicas_are_checked(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "orca-replicas", f"replicas={text}"]) == 2
    assert "replicas is" in " ".join(capfd.readouterr().err.split())
