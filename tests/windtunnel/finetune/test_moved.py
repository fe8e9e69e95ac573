"""The report of what has moved names the parts that were changed, and those alone."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import fine_tune, translate, update
from mlsys_windtunnel.export.artifact import save
from mlsys_windtunnel.finetune.moved import what_moved
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler


def _rows(seed: int, border: float, num_rows: int = 600):
    import pandas as pd

    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(size=num_rows), "city": rng.choice(["Bern", "Oslo"], num_rows)})
    share = 1 / (1 + np.exp(-4 * (frame.a - border) - (frame.city == "Oslo")))
    return frame, (rng.random(num_rows) < share).astype(int)


def _source(model):
    columns = make_column_transformer((StandardScaler(), ["a"]), (OneHotEncoder(), ["city"]))
    return make_pipeline(columns, model).fit(*_rows(0, border=-0.8))


def _trees():
    return _source(HistGradientBoostingClassifier(max_iter=12, max_leaf_nodes=6, random_state=0))


def test_an_update_in_closed_form_moves_leaves_and_thresholds_of_the_column_that_drifts():
    start = translate(_trees())
    state = update(start, *_rows(1, border=0.9, num_rows=2_000))
    changes = what_moved(start, state.module)
    assert {change.kind for change in changes} == {"leaf", "threshold"}
    assert {change.column for change in changes if change.kind == "threshold"} == {0}, "a city has no other threshold"
    thresholds = next(change for change in changes if change.kind == "threshold")
    assert thresholds.after.mean() > thresholds.before.mean() + 0.3
    assert what_moved(start, start) == []
    with pytest.raises(InvalidInputError, match="these are two pipelines"):
        what_moved(start, translate(HistGradientBoostingClassifier(max_iter=2).fit(np.eye(80), np.arange(80) % 2)))


def test_training_by_gradients_is_told_in_units_of_the_column():
    start = translate(_trees())
    tuned = fine_tune(start, *_rows(1, border=0.9), epochs=4, lr=3e-2)
    changes = what_moved(start, tuned.module)
    assert {change.kind for change in changes} >= {"leaf", "threshold", "scale", "category"}
    exact = start.predictor.body.ensemble
    one = next(change for change in changes if change.kind == "threshold" and change.column == 0)
    used = exact.threshold[exact.feature == 0]
    assert used.min() - 0.2 < one.before.min() <= one.before.max() < used.max() + 0.2


def test_weights_of_linear_models():
    start = translate(_source(LogisticRegression()))
    tuned = fine_tune(start, *_rows(1, border=0.9), epochs=2, lr=1e-2, scope="pipeline")
    kinds = {change.kind for change in what_moved(start, tuned.module)}
    assert "weight" in kinds


def test_the_command_compares_a_folder_with_the_pipeline_it_keeps(tmp_path, capsys):
    start = translate(_trees())
    save(start, tmp_path / "model")
    _rows(1, border=0.9)[0].assign(late=_rows(1, border=0.9)[1]).to_parquet(tmp_path / "week.parquet")
    folder = str(tmp_path / "model")
    assert run(["windtunnel", "moved", folder]) != 0
    assert "holds no pipeline of before: name it with --from" in capsys.readouterr().err
    assert run(["windtunnel", "update", folder, str(tmp_path / "week.parquet"), "--target", "late", "-o", folder]) == 0
    assert run(["windtunnel", "moved", folder]) == 0
    assert "threshold" in capsys.readouterr().out
    assert run(["windtunnel", "moved", f"{folder}/start", "--from", f"{folder}/start"]) == 0
    assert "nothing has moved" in capsys.readouterr().out
