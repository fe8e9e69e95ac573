"""``mlsys orca bench``: options reach the plan, results are written, wrong ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_core.cli.main import run


def test_options_reach_the_plan(
    make_gguf: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = ["--requests", "3", "--prompts", "constant:4", "--outputs", "uniform:2:3", "--max-batch-size", "2"]
    arguments = ["--policy", "paged", "--policy", "orca", "--rates", "100,200", "--threads", "1", "--kv-tokens", "64"]
    where = ["--model", str(make_gguf()), "--dtype", "fp32", "--output", str(tmp_path / "out")]
    assert run(["orca", "bench", "--quick", *limits, *arguments, *where]) == 0
    results = json.loads((tmp_path / "out" / "orca.json").read_text())["results"]
    assert [(each["policy"], each["rate"]) for each in results["runs"]] == [
        (policy, rate) for rate in (None, 100.0, 200.0) for policy in ("paged", "orca")
    ]
    assert (results["num_requests"], results["max_batch_size"], results["num_kv_tokens"]) == (3, 2, 64)
    assert results["workload"]["prompts"] == {"kind": "Constant", "length": 4}
    assert "200 requests per second" in capfd.readouterr().out
    assert (tmp_path / "out" / "orca.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("rates", ["0", "1,,2", "x", "inf", "-1"])
def test_rates_are_positive_numbers(rates: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["orca", "bench", f"--rates={rates}", "--model", "no-such-model"]) == 2
    assert "write numbers above 0" in " ".join(capfd.readouterr().err.split())


def test_the_paper_simulated(tmp_path: Path) -> None:
    arguments = ["--simulate", "--quick", "--requests", "4", "--output", str(tmp_path)]
    assert run(["orca", "bench", "paper", *arguments]) == 0
    results = json.loads((tmp_path / "orca-paper-simulated.json").read_text())["results"]
    assert results["backend"] == "simulated"
    assert (tmp_path / "orca-paper-simulated-2.svg").exists()
