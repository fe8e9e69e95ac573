from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_core.bench import BenchContext
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Table
from mlsys_windtunnel.bench import infer
from mlsys_windtunnel.bench.contestants import MAKERS, Bout
from mlsys_windtunnel.bench.race import DoesNotApply, Outcome, Runner, race
from mlsys_windtunnel.bench.workloads import Workload, workloads
from rich.console import Console

TABLE = np.arange(12.0).reshape(6, 2)
EXPECTED = TABLE[:, 0] / 12


def _right(x: np.ndarray) -> np.ndarray:
    return np.stack([1 - x[:, 0] / 12, x[:, 0] / 12], axis=1)


def _race(builders: dict[str, Any], **options: Any) -> dict[str, Outcome]:
    ticks = count()
    settings: dict[str, Any] = {"batches": (1, 4), "rounds": 3, "turn_s": 2.0, "tolerance": 1e-6}
    return race(builders, TABLE, EXPECTED, **settings | {"clock": lambda: float(next(ticks))} | options)


def _as_is(x: Any) -> Any:
    return x


def test_times_each_batch_once_a_round() -> None:
    seen: list[int] = []

    def answer(x: np.ndarray) -> np.ndarray:
        seen.append(len(x))
        return _right(x)

    outcome = _race({"one": lambda: Runner(_as_is, answer, note="float32")})["one"]
    assert (outcome.status, outcome.note, outcome.difference) == ("timed", "float32", 0)
    # the clock ticks once between start and end of a turn, in which the calls that fill two seconds are made
    assert outcome.samples_s == {1: (0.5, 0.5, 0.5), 4: (0.5, 0.5, 0.5)}
    assert outcome.median_s(4) == 0.5
    assert seen[0] == len(TABLE), "answers are compared before anything is timed"
    assert seen.count(1) == seen.count(4) == 2 * 2 + 3 * (1 + 2)  # two to count calls by, then a warm-up and two


def test_takes_turns_in_both_orders() -> None:
    order: list[str] = []

    def contestant(name: str) -> Runner:
        return Runner(_as_is, lambda x: (order.append(name), _right(x))[1])

    _race({name: lambda name=name: contestant(name) for name in "ab"}, batches=(1,), rounds=2, turn_s=0.0)
    assert order[-8:] == ["a", "a", "b", "b", "b", "b", "a", "a"]


@pytest.mark.parametrize("off_by", [0.25, float("nan")])
def test_does_not_time_what_answers_otherwise(off_by: float) -> None:
    def answer(x: np.ndarray) -> np.ndarray:
        wrong = _right(x)
        wrong[-1] += off_by
        return wrong

    outcome = _race({"wrong": lambda: Runner(_as_is, answer)})["wrong"]
    assert (outcome.status, outcome.samples_s, outcome.median_s(1)) == ("differs", None, None)
    assert outcome.note == "1 of 6 rows differ by more than 1e-06"
    assert outcome.difference == (pytest.approx(0.25) if off_by == 0.25 else None)


def test_compares_what_finish_makes_of_the_answer() -> None:
    outcomes = _race({"scores": lambda: Runner(lambda x: x[:, :1], lambda x: x * 2, lambda scores: scores / 24)})
    assert outcomes["scores"].status == "timed"


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (ModuleNotFoundError("No module named 'peer'", name="peer"), "not installed", "no package peer"),
        (DoesNotApply("trees alone"), "does not apply", "trees alone"),
        (TypeError("a\nboolean"), "does not run", "TypeError: a boolean"),
    ],
)
def test_says_why_somebody_was_not_timed(error: Exception, status: str, note: str) -> None:
    def build() -> Runner:
        raise error

    outcomes = _race({"absent": build, "present": lambda: Runner(_as_is, _right)})
    assert (outcomes["absent"].status, outcomes["absent"].note) == (status, note)
    assert outcomes["present"].status == "timed"


@pytest.fixture(scope="module")
def models() -> list[Workload]:
    return workloads(40, num_threads=1, num_trees=3)


def test_workloads_are_the_same_each_time(models: list[Workload]) -> None:
    again = workloads(40, num_threads=1, num_trees=3)
    for one, two in zip(models, again, strict=True):
        assert one.name == two.name
        np.testing.assert_array_equal(one.source.predict_proba(one.table), two.source.predict_proba(two.table))
        probability = one.source.predict_proba(one.table)[:, 1]
        assert len(one.table) == 40
        assert probability.std() > 0.01, "a model of which each row is alike shows no difference"


def test_numbers_and_thresholds_are_float32_in_the_plain_tables(models: list[Workload]) -> None:
    table = models[0].table
    np.testing.assert_array_equal(table, table.astype(np.float32))


@pytest.mark.parametrize("name", ["WindTunnel", "WindTunnel network", "source", "LightGBM booster"])
def test_own_contestants_answer_as_the_sources_do(name: str, models: list[Workload], tmp_path: Path) -> None:
    for workload in models:
        if name == "LightGBM booster" and not workload.name.startswith("LightGBM"):
            continue
        runner = MAKERS[name](Bout(workload, 1, tmp_path))
        got = np.asarray(runner.finish(runner.answer(runner.prepare(workload.table))))
        expected = workload.source.predict_proba(workload.table)[:, 1]
        np.testing.assert_allclose(got.reshape(40, -1)[:, -1], expected, rtol=0, atol=1e-12)


def test_peers_that_are_for_trees_sit_pipelines_out(models: list[Workload], tmp_path: Path) -> None:
    for workload in (model for model in models if model.is_pipeline or model.name == "LogisticRegression"):
        for name in ("treelite GTIL", "LightGBM booster", "source, 1 thread"):
            with pytest.raises(DoesNotApply):
                MAKERS[name](Bout(workload, 2, tmp_path))


def _report(outcomes: dict[str, Outcome]) -> Any:
    return infer.report({"forest": outcomes}, batches=(1, 100), rounds=3, num_threads=1, loads=[0.0, 99.0])


SOURCE = Outcome("timed", "", 0.0, {1: (2e-3, 1e-3, 4e-3), 100: (0.5,)})


def test_report_gives_medians_and_their_ratio() -> None:
    own = Outcome("timed", "float32", 1e-7, {1: (1e-4, 4e-3, 5e-4), 100: (1.0,)})
    section = _report({"source": SOURCE, "ONNX Runtime": own})
    (table,) = (item for item in section.body if isinstance(item, Table))
    assert table.rows[1] == ["ONNX Runtime", "500 us", "4.00", "1e+03 ms", "0.50", "1.0e-07", "float32"]
    recorded = section.data["models"]["forest"]["ONNX Runtime"]
    assert recorded["median_s"] == {"1": 5e-4, "100": 1.0}
    assert section.data["is_loaded"], "99 is more than the machine has cores"
    assert any("other work" in item for item in section.body if isinstance(item, str))
    json.dumps(section.data, allow_nan=False)


def test_report_names_who_is_missing_and_fails_only_for_own_faults() -> None:
    missing = Outcome("not installed", "no package treelite")
    section = _report({"source": SOURCE, "treelite GTIL": missing, "tl2cgen": Outcome("does not apply", "")})
    lines = [item for item in section.body if isinstance(item, str)]
    assert any(line.startswith("treelite GTIL, not installed: no package treelite; pip install") for line in lines)
    assert not any("tl2cgen" in line for line in lines)
    assert section.status == "ok"
    wrong = Outcome("differs", "1 of 2 rows", 0.1)
    assert _report({"source": SOURCE, "Hummingbird jit": wrong}).status == "ok"
    assert _report({"source": SOURCE, "WindTunnel": wrong}).status == "failed"
    assert _report({"source": SOURCE, "WindTunnel ONNX": Outcome("not installed", "no package onnx")}).status == "ok"


def test_suite_runs_on_one_small_model(models: list[Workload]) -> None:
    context = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)
    (workload,) = (model for model in models if model.name == "LogisticRegression")
    outcomes = infer.race_on(workload, context, batches=(1, 8), rounds=1, turn_s=0.0)
    assert outcomes["source"].status == outcomes["WindTunnel"].status == "timed"
    assert set(outcomes) == set(MAKERS) - infer.LEFT_OUT_OF_QUICK


def test_suite_is_registered() -> None:
    spec = installed_plugins().registry.get(BenchmarkSpec, "windtunnel-infer")
    assert spec.run == "mlsys_windtunnel.bench.infer:run"
