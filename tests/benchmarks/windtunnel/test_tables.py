"""``mlsys bench windtunnel-tables`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlsys_core.cli.main import run
from mlsys_core.config import settings
from mlsys_core.models import find_entry

TABLES = ("bench", "windtunnel-tables")


def test_names_cells_and_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [*TABLES, "tables=5.4", "data=adult", "only=source", "dry_run=true", "-o", str(tmp_path)]
    assert run(command) == 0
    # the other seeds follow when the first has chosen between candidates
    assert capsys.readouterr().out.split() == [
        f"adult/{pre}/pipe2/source/1/candidate0/seed0" for pre in ("pre2", "pre3")
    ]
    assert not list(tmp_path.iterdir())


def test_rows_are_chosen_by_columns_and_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [*TABLES, "tables=5.3,outside", "data=adult", "only=source,lightgbm"]
    assert run([*command, "columns=pre1", "pipe=pipe3", "dry_run=true", "-o", str(tmp_path)]) == 0
    keys = [key.rsplit("/", 2)[0] for key in capsys.readouterr().out.split()]
    # models that read raw columns stay
    assert set(keys) == {"adult/pre1/pipe3/source/1", "adult/-/-/lightgbm/1"}


def test_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run([*TABLES, "tables=5.9", "-o", str(tmp_path)]) != 0
    assert "5.9" in capsys.readouterr().err
    assert run([*TABLES, "only=transformer", "-o", str(tmp_path)]) != 0
    assert "there are L1, L2, L3, catboost," in capsys.readouterr().err
    assert run([*TABLES, "tables=ratings", "data=adult", "-o", str(tmp_path)]) != 0
    assert "no row is left to run with" in capsys.readouterr().err


@pytest.mark.skipif(find_entry("adult").source.locate(settings().cache_dir) is None, reason="adult is not here")
def test_writes_a_journal_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [*TABLES, "tables=5.4", "data=adult", "only=source", "--quick", "seeds=1"]
    for _ in range(2):  # the second time there is nothing left to run
        assert run([*command, "-o", str(tmp_path)]) == 0
        assert "AUC on test rows" in capsys.readouterr().out
    lines = (tmp_path / "windtunnel-tables-quick.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2
    data = json.loads((tmp_path / "windtunnel-tables.json").read_text())
    assert {row["pre"]: row["seeds_run"] for row in data["results"]["rows"]} == {"pre2": [0], "pre3": [0]}


@pytest.mark.skipif(find_entry("adult").source.locate(settings().cache_dir) is None, reason="adult is not here")
def test_trees_of_the_sources_are_part_of_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [*TABLES, "tables=5.4", "data=adult", "only=source", "seeds=1", "-o", str(tmp_path)]
    assert run([*command, "trees=2"]) == 0
    head = json.loads((tmp_path / "windtunnel-tables.jsonl").read_text().splitlines()[0])
    assert head["setting"]["num_trees"] == 2
    assert run([*command, "trees=3"]) != 0
    assert "another setting" in capsys.readouterr().err
