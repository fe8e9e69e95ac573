"""A few hundred new labels move a fitted pipeline; labels that say nothing leave it as it is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import UpdateOptions, WindTunnelClassifier, translate, update
from mlsys_windtunnel.export.artifact import load, save
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

SMALL = {"n_estimators": 10, "num_leaves": 8, "verbose": -1, "n_jobs": 1}
QUICK = {"lr": 5e-3, "epochs": 5}


def _rows(seed: int, border: float, num_rows: int = 400):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(size=num_rows), "b": rng.normal(size=num_rows)})
    frame["city"] = rng.choice(["Bern", "Oslo"], num_rows)
    share = 1 / (1 + np.exp(-3 * (frame.a - border) - (frame.city == "Oslo")))
    return frame, np.where(rng.random(num_rows) < share, "late", "on time")


def _source(model=None):
    columns = make_column_transformer((StandardScaler(), ["a", "b"]), (OneHotEncoder(), ["city"]))
    return make_pipeline(columns, model or LGBMClassifier(**SMALL)).fit(*_rows(0, border=-0.5, num_rows=2_000))


@pytest.mark.parametrize("method", ["closed", "gradient"])
def test_new_labels_move_the_answers_and_leave_the_start_as_it_is(method):
    QUICK = {"lr": 5e-3, "epochs": 5, "method": method}  # noqa: N806
    source = _source()
    start = translate(source)
    fresh, truth = _rows(9, border=0.8, num_rows=2_000)
    before = start.predict_proba(fresh)
    memory, losses = None, [log_loss(truth, before)]
    for week in range(3):
        state = update(start, *_rows(10 + week, border=0.8), memory=memory, options=UpdateOptions(**QUICK))
        memory = state.memory
        assert state.epochs > 0
        assert state.gain > state.gain_se
        losses.append(log_loss(truth, state.module.predict_proba(fresh)))
    assert losses[-1] < losses[0] - 0.1
    assert losses[-1] < losses[1], "more labels, a better model"
    np.testing.assert_array_equal(start.predict_proba(fresh), before)
    assert len(memory.x) == 1_200
    assert set(memory.age.tolist()) == {0, 1, 2}
    again = update(start, *_rows(10, border=0.8), options=UpdateOptions(**QUICK))
    first = update(start, *_rows(10, border=0.8), options=UpdateOptions(**QUICK))
    np.testing.assert_array_equal(again.module.predict_proba(fresh), first.module.predict_proba(fresh))


@pytest.mark.parametrize("method", ["closed", "gradient"])
@pytest.mark.parametrize("seed", range(3))
def test_labels_that_say_nothing_new_keep_the_fitted_pipeline(seed, method):
    source = _source()
    rng = np.random.default_rng(seed)
    frame, _ = _rows(20 + seed, border=-0.5)
    labels = np.where(rng.random(len(frame)) < source.predict_proba(frame)[:, 0], "late", "on time")  # it is the truth
    state = update(translate(source), frame, labels, options=UpdateOptions(min_gain_se=3.0, method=method, **QUICK))
    assert state.epochs == 0
    np.testing.assert_allclose(state.module.predict_proba(frame), source.predict_proba(frame), atol=1e-12)


def test_few_labels_are_remembered_and_old_ones_forgotten():
    start = translate(_source())
    frame, labels = _rows(1, border=0.8)
    state = update(start, frame[:20], labels[:20])
    assert (state.epochs, len(state.memory.x)) == (0, 20)
    assert state.module is start
    state = update(start, frame, labels, memory=state.memory, options=UpdateOptions(most_rows=300, **QUICK))
    assert len(state.memory.x) == 300
    assert state.memory.age.max() == 0, "the oldest are forgotten first"
    twice = state.memory.followed_by(state.memory, 600)
    assert twice.batch(half_life=1.0).weight.unique().tolist() == [0.5, 1.0]
    assert twice.batch(half_life=1.0, most=200).weight.unique().tolist() == [1.0], "the newest"


def test_regressors():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 3))
    source = LGBMRegressor(**SMALL).fit(x, x[:, 0])
    state = update(translate(source), x[:400], x[:400, 0] + 1.0, options=UpdateOptions(lr=2e-2, epochs=8))
    errors = [np.mean((each.predict(x[400:]) - x[400:, 0] - 1) ** 2) for each in (source, state.module)]
    assert errors[1] < 0.7 * errors[0]


def test_the_estimator_is_updated_in_place_and_fitted_anew():
    frame, labels = _rows(0, border=-0.5, num_rows=1_000)
    model = WindTunnelClassifier(_source().set_params(), epochs=1, random_state=0).fit(frame, labels)
    fresh, truth = _rows(9, border=0.8, num_rows=1_000)
    before = log_loss(truth, model.predict_proba(fresh))
    for week in range(2):
        assert model.update(*_rows(30 + week, border=0.8), **QUICK) is model
    assert log_loss(truth, model.predict_proba(fresh)) < before - 0.05
    assert len(model.update_[1].x) == 800
    assert model.fit(frame, labels).update_[1] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most_rows": 3}, "most_rows is 3"),
        ({"folds": 1}, "folds is 1"),
        ({"half_life": 0}, "half_life must be above 0"),
        ({"method": "magic"}, "method is 'magic'; it is one of auto, closed, gradient"),
        ({"gradient_rows": 3}, "gradient_rows is 3"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        UpdateOptions(**options)


def test_several_classes():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3_000, 4))
    before, now = np.digitize(x[:, 0], [-0.5, 0.5]), np.digitize(x[:, 0], [0.2, 1.0])
    source = LGBMClassifier(**SMALL).fit(x[:1000], before[:1000])
    memory, start = None, translate(source)
    for part in (slice(1000, 1500), slice(1500, 2000)):
        state = update(start, x[part], now[part], memory=memory)
        memory = state.memory
    assert state.memory.margin.shape == (1_000, 4, 3)
    was, became = (log_loss(now[2000:], each.predict_proba(x[2000:])) for each in (start, state.module))
    assert became < 0.5 * was


def test_without_drift_many_small_updates_undo_nothing():
    """Some hundreds of labels must not undo what thousands have taught."""
    source = _source(LGBMClassifier(n_estimators=60, num_leaves=8, verbose=-1, n_jobs=1))
    fresh, truth = _rows(77, border=-0.5, num_rows=8_000)
    start, memory = translate(source), None
    for week in range(6):
        state = update(start, *_rows(50 + week, border=-0.5, num_rows=100), memory=memory)
        memory = state.memory
        was, became = (log_loss(truth, each.predict_proba(fresh)) for each in (start, state.module))
        assert became < was + 0.01


def test_closed_form_is_refused_where_there_is_none():
    source = _source(LogisticRegression())
    with pytest.raises(InvalidInputError, match="does not end in boosted trees alone: leave method at 'auto'"):
        update(translate(source), *_rows(1, border=0.8), options=UpdateOptions(method="closed"))
    state = update(translate(source), *_rows(1, border=0.8), options=UpdateOptions(lr=3e-2))
    assert state.epochs > 0


def test_a_memory_of_another_method_is_refused():
    start = translate(_source())
    first = update(start, *_rows(1, border=0.8), options=UpdateOptions(method="gradient", **QUICK))
    with pytest.raises(InvalidInputError, match="the memory's margin has rows of shape"):
        update(start, *_rows(2, border=0.8), memory=first.memory)


def test_unknown_labels_are_refused():
    frame, labels = _rows(1, border=0.0)
    with pytest.raises(InvalidInputError, match="'cancelled', which the pipeline does not know"):
        update(translate(_source()), frame, np.where(labels == "late", "cancelled", labels))


def test_the_command_goes_on_from_its_own_folder(tmp_path, capsys):
    start = translate(_source())
    save(start, tmp_path / "churn")
    fresh, truth = _rows(9, border=0.8, num_rows=1_000)
    memory = None
    for week in range(2):
        frame, labels = _rows(40 + week, border=0.8)
        frame.assign(when=labels).to_parquet(tmp_path / "week.parquet")
        arguments = [
            "windtunnel",
            "update",
            str(tmp_path / "churn"),
            str(tmp_path / "week.parquet"),
            "--target",
            "when",
        ]
        assert run([*arguments, "-o", str(tmp_path / "churn"), "--lr", "5e-3", "--epochs", "5"]) == 0
        state = update(start, frame, labels, memory=memory, options=UpdateOptions(**QUICK))
        memory = state.memory
    assert "fitted anew on 800 labels" in capsys.readouterr().out
    loaded = load(tmp_path / "churn")
    np.testing.assert_allclose(loaded.predict_proba(fresh), state.module.predict_proba(fresh), atol=1e-9)
    assert roc_auc_score(truth == "on time", loaded.predict_proba(fresh)[:, 1]) > 0.8
    (tmp_path / "churn" / "memory.safetensors").write_bytes(b"no tensors")
    assert run([*arguments, "-o", str(tmp_path / "churn")]) != 0
    assert "memory.safetensors is damaged" in capsys.readouterr().err


def test_memory_holds_no_gradients():
    state = update(translate(_source()), *_rows(1, border=0.8))
    assert all(
        isinstance(each, torch.Tensor) and not each.requires_grad for each in (state.memory.x, state.memory.weight)
    )
