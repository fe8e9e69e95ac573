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
from mlsys_windtunnel.bench.machine import CpuTimes, cpu_times, share_of_others
from mlsys_windtunnel.bench.outcome_report import Conditions, report, speed_up
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


@pytest.mark.parametrize(
    "name", ["WindTunnel", "WindTunnel columns", "WindTunnel network", "source", "LightGBM booster"]
)
def test_own_contestants_answer_as_the_sources_do(name: str, models: list[Workload], tmp_path: Path) -> None:
    for workload in models:
        if name == "LightGBM booster" and not workload.name.startswith("LightGBM"):
            continue
        if name == "WindTunnel columns" and not workload.is_pipeline:
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


CONDITIONS = Conditions(num_threads=1, rounds=3, tolerance=1e-5, load_average=(0.0, 99.0), share_of_others=0.25)


def _report(outcomes: dict[str, Outcome]) -> Any:
    return report({"forest": outcomes}, batches=(1, 100), conditions=CONDITIONS)


SOURCE = Outcome("timed", "", 0.0, {1: (2e-3, 1e-3, 4e-3), 100: (0.5,)})


def test_report_gives_medians_and_the_median_of_ratios_within_rounds() -> None:
    own = Outcome("timed", "float32", 1e-7, {1: (1e-4, 4e-3, 5e-4), 100: (1.0,)})
    assert speed_up(own, SOURCE, 1) == 8.0  # of 20, 1/4 and 8
    section = _report({"source": SOURCE, "ONNX Runtime": own})
    _, table = (item for item in section.body if isinstance(item, Table))
    assert table.rows[1] == ["ONNX Runtime", "500 us", "8.00", "1e+03 ms", "0.50", "1.0e-07", "float32"]
    recorded = section.data["models"]["forest"]["ONNX Runtime"]
    assert recorded["median_s"] == {"1": 5e-4, "100": 1.0}
    assert recorded["speed_up"] == {"1": 8.0, "100": 0.5}
    lines = [item for item in section.body if isinstance(item, str)]
    assert any("other processes used 25% of the machine. The machine had other work" in line for line in lines)
    json.dumps(section.data, allow_nan=False)


def test_standing_compares_the_fastest_with_the_fastest_of_the_same_containers() -> None:
    def timed(one: float, many: float) -> Outcome:
        return Outcome("timed", "", 0.0, {1: (one,), 100: (many,)})

    section = _report(
        {
            "source": timed(8.0, 8.0),
            "LightGBM booster": timed(4.0, 9.0),
            "WindTunnel": timed(2.0, 4.0),
            "WindTunnel columns": timed(1.0, 1.0),
            "WindTunnel ONNX": timed(5.0, 2.0),
            "ONNX Runtime": timed(1.5, 4.0),
            "treelite GTIL": Outcome("not installed", ""),
        }
    )
    standing = next(item for item in section.body if isinstance(item, Table))
    assert [*standing.columns][1:4] == ["source 1", "source 100", "ONNX Runtime 1"]
    assert list(standing.rows[0]) == ["forest", "2.00", "4.00", "1.50", "4.00", "-", "-", "-", "-"]


def test_the_share_of_others_is_what_is_busy_less_ones_own() -> None:
    before = CpuTimes(busy_s=100.0, total_s=1000.0, own_s=5.0)
    assert share_of_others(before, CpuTimes(busy_s=130.0, total_s=1040.0, own_s=15.0)) == 0.5
    assert share_of_others(before, before) is None
    assert share_of_others(None, before) is None


def test_the_kernels_counters_are_read(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 800 40 1 2 7 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    times = cpu_times(stat)
    assert times is not None
    assert times.busy_s / times.total_s == 160 / 1000
    assert times.own_s > 0
    assert cpu_times(tmp_path / "none") is None


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
