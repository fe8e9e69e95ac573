"""The suite over a tiny model: every policy measured, answers compared, wrong ones withheld, Ctrl-C kept."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from mlsys_bench.orca import policies, serve
from mlsys_bench.orca.policies import Plan, run_plan
from mlsys_bench.orca.serve import Workload
from mlsys_bench.workload.lengths import Uniform
from mlsys_core.bench import BenchContext, write_results
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Figure, Table
from mlsys_orca.loading.loaded import LoadedModel
from rich.console import Console

WORKLOAD = Workload(prompts=Uniform(2, 20), outputs=Uniform(1, 6), num_requests=5, shared_prefix=32)


@pytest.fixture
def context() -> BenchContext:
    return BenchContext(Console(file=io.StringIO(), width=120), is_quick=True, device="cpu", num_threads=1)


def tables(section: object) -> list[Table]:
    return [item for item in section.body if isinstance(item, Table)]


def test_every_policy_is_measured_on_equal_answers(loaded: LoadedModel, context: BenchContext, tmp_path: Path) -> None:
    section = run_plan(loaded, Plan(workload=WORKLOAD, rates=(200.0,), max_batch_size=2), context)
    assert section.status == "ok"
    assert [table.caption for table in tables(section)] == ["All requests at once", "200 requests per second"]
    for table in tables(section):
        assert [row[0] for row in table.rows] == list(policies.POLICIES)
        assert {row[-1] for row in table.rows} <= {"reference", "5 equal"}
    runs = section.data["runs"]
    assert [run["num_succeeded"] for run in runs] == [5] * 8
    by_policy = {run["policy"]: run for run in runs if run["rate"] is None}
    assert by_policy["orca"]["num_cached_tokens"] == 0
    assert by_policy["paged"]["num_cached_tokens"] >= 2 * 32, "those after the first two find the shared blocks"
    assert any(isinstance(item, Figure) for item in section.body)
    paths = write_results("orca", section, dataclasses.replace(context, output_dir=tmp_path))
    assert [path.name for path in paths] == ["orca.json", "orca.html", "orca.svg"]
    assert json.loads(paths[0].read_text())["results"]["num_requests"] == 5


def test_rates_follow_what_the_best_policy_does_at_once(loaded: LoadedModel, context: BenchContext) -> None:
    plan = Plan(workload=WORKLOAD, policies=("orca", "chunked"), loads=(0.5,))
    runs = run_plan(loaded, plan, context).data["runs"]
    best = max(run["throughput_rps"] for run in runs if run["rate"] is None)
    assert {run["rate"] for run in runs} == {None, 0.5 * best}


def test_wrong_answers_fail_the_suite_and_have_no_times(
    loaded: LoadedModel, context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, served = serve.serve_trace, []

    def serve_second_wrong(*args: object, **options: object) -> serve.ServedRun:
        run = real(*args, **options)
        served.append(run)
        if len(served) == 2:
            wrong = {index: tuple(259 for _ in tokens) for index, tokens in run.answers.items()}
            return serve.ServedRun(result=run.result, answers=wrong, num_preemptions=0, num_cached_tokens=0)
        return run

    monkeypatch.setattr(serve, "serve_trace", serve_second_wrong)
    plan = Plan(workload=WORKLOAD, policies=("orca", "paged"), rates=(200.0,))
    section = run_plan(loaded, plan, context)
    assert section.status == "failed"
    at_once = tables(section)[0].rows
    assert at_once[1][0] == "paged"
    assert set(at_once[1][1:7]) == {"-"}
    assert at_once[1][-1] == "5 of 5 WRONG"
    assert at_once[0][1] != "-"


def test_an_interrupt_keeps_what_was_measured(
    loaded: LoadedModel, context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, served = serve.serve_trace, []

    def serve_twice(*args: object, **options: object) -> serve.ServedRun:
        if len(served) == 2:
            raise KeyboardInterrupt
        served.append(real(*args, **options))
        return served[-1]

    monkeypatch.setattr(serve, "serve_trace", serve_twice)
    section = run_plan(loaded, Plan(workload=WORKLOAD), context)
    assert section.data["interrupted"] is True
    assert [run["policy"] for run in section.data["runs"]] == ["orca", "paged"]
    assert "Interrupted: what was measured until then." in section.body


def test_plans_and_refusals(loaded: LoadedModel, context: BenchContext) -> None:
    with pytest.raises(InvalidInputError, match="no scheduling policy is called 'fifo'"):
        run_plan(loaded, Plan(workload=WORKLOAD, policies=("fifo",)), context)
    with pytest.raises(InvalidInputError, match="no policy to measure"):
        run_plan(loaded, Plan(workload=WORKLOAD, policies=()), context)
