from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_bench.harness.machine import Load
from mlsys_bench.harness.race import LeftOut, Outcome
from mlsys_bench.windtunnel import infer
from mlsys_bench.windtunnel.cases import MAKERS, Subject
from mlsys_bench.windtunnel.infer import report
from mlsys_bench.windtunnel.workloads import Workload, workloads
from mlsys_core.report import Section, Table


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
def test_own_cases_answer_as_the_sources_do(name: str, models: list[Workload], tmp_path: Path) -> None:
    for workload in models:
        if name == "LightGBM booster" and not workload.name.startswith("LightGBM"):
            continue
        if name == "WindTunnel columns" and not workload.is_pipeline:
            continue
        runner = MAKERS[name](Subject(workload, 1, tmp_path))
        got = np.asarray(runner.finish(runner.answer(runner.prepare(workload.table))))
        expected = workload.source.predict_proba(workload.table)[:, 1]
        np.testing.assert_allclose(got.reshape(40, -1)[:, -1], expected, rtol=0, atol=1e-12)


def test_peers_that_are_for_trees_sit_pipelines_out(models: list[Workload], tmp_path: Path) -> None:
    for workload in (model for model in models if model.is_pipeline or model.name == "LogisticRegression"):
        for name in ("treelite GTIL", "LightGBM booster", "source, 1 thread"):
            with pytest.raises(LeftOut):
                MAKERS[name](Subject(workload, 2, tmp_path))


def _report(outcomes: dict[str, Outcome]) -> Section:
    load = Load((0.0, 99.0), 0.25)
    races = {"forest": {1: outcomes, 100: outcomes}}
    return report(races, num_threads=1, rounds=3, tolerance=1e-5, load=load)


def _timed(*seconds: float, note: str = "") -> Outcome:
    return Outcome("timed", note, 0.0, turns_s=tuple((one,) for one in seconds))


def test_report_gives_medians_and_the_median_of_ratios_within_rounds() -> None:
    section = _report({"source": _timed(2e-3, 1e-3, 4e-3), "ONNX Runtime": _timed(1e-4, 4e-3, 5e-4, note="float32")})
    recorded = section.data["models"]["forest"]["ONNX Runtime"]
    assert recorded["median_s"] == {"1": 5e-4, "100": 5e-4}
    assert recorded["speed_up"] == {"1": 8.0, "100": 8.0}  # of 20, 1/4 and 8
    assert any("other processes used 25% of the machine" in item for item in section.body if isinstance(item, str))
    json.dumps(section.data, allow_nan=False)


def test_standing_compares_the_fastest_with_the_fastest_of_the_same_containers() -> None:
    section = _report(
        {
            "source": _timed(8.0),
            "LightGBM booster": _timed(4.0),
            "WindTunnel": _timed(2.0),
            "WindTunnel columns": _timed(1.0),
            "WindTunnel ONNX": _timed(5.0),
            "ONNX Runtime": _timed(1.5),
            "treelite GTIL": Outcome("not installed", ""),
        }
    )
    standing = next(item for item in section.body if isinstance(item, Table))
    assert [*standing.columns][1:4] == ["source 1", "source 100", "ONNX Runtime 1"]
    assert list(standing.rows[0]) == ["forest", "2.00x", "2.00x", "1.50x", "1.50x", "-", "-", "-", "-"]


def test_report_names_who_is_missing_and_fails_only_for_own_faults() -> None:
    source, missing = _timed(1.0), Outcome("not installed", "no package treelite")
    section = _report({"source": source, "treelite GTIL": missing, "tl2cgen": Outcome("left out", "")})
    lines = [item for item in section.body if isinstance(item, str)]
    assert any("treelite GTIL: not installed (no package treelite; pip install" in line for line in lines)
    assert not any("tl2cgen" in line for line in lines)
    assert section.status == "ok"
    wrong = Outcome("differs", "by 0.1")
    assert _report({"source": source, "Hummingbird jit": wrong}).status == "ok"
    assert _report({"source": source, "WindTunnel": wrong}).status == "failed"
    assert _report({"source": source, "WindTunnel ONNX": Outcome("not installed", "no package onnx")}).status == "ok"


@pytest.mark.parametrize(("off_by", "expected"), [(0.25, 0.25), (float("nan"), float("inf"))])
def test_difference_is_that_of_the_last_class(off_by: float, expected: float) -> None:
    right = np.array([0.25, 0.5])
    answer = np.stack([1 - right, right + np.array([0, off_by])], axis=1)
    assert infer.difference(answer, right) == expected


def test_suite_runs_on_one_small_model(models: list[Workload]) -> None:
    (workload,) = (model for model in models if model.name == "LogisticRegression")
    makers: dict[str, Any] = {name: MAKERS[name] for name in set(MAKERS) - infer.LEFT_OUT_OF_QUICK}
    outcomes = infer.race_on(workload, makers, 1, batches=(1, 8), rounds=1, turn_s=0.0)
    assert list(outcomes) == [1, 8]
    for found in outcomes.values():
        assert set(found) == set(makers)
        assert found["source"].status == found["WindTunnel"].status == "timed"
        assert found["WindTunnel"].median_s is not None
