"""Cells of the tables and the order in which they run; nothing is fitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE
from mlsys_bench.windtunnel.experiments.plan import (
    OUTSIDE_MODELS,
    TABLES,
    Cell,
    Result,
    Row,
    chosen,
    next_cells,
    results_of,
    rows_of,
)
from mlsys_bench.windtunnel.experiments.run import TRANSLATIONS, candidates
from mlsys_core.errors import InvalidInputError

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
