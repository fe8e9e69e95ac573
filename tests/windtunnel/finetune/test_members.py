"""Members beside a pipeline's own trees: one sum of scores, weighed by rows held out, that is saved and trained on."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor, translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.finetune.makers import Scaling, drawn_options, fit_linear, fit_perceptron
from mlsys_windtunnel.finetune.members import weigh, with_members
from mlsys_windtunnel.finetune.options import TrainingOptions
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": RNG.normal(size=300), "b": RNG.normal(size=300), "c": RNG.choice(["x", "y", "z"], 300)})
VALUE = (FRAME.a * 2 + (FRAME.c == "x") + RNG.normal(size=300)).to_numpy()
COLUMNS = make_column_transformer((StandardScaler(), ["a", "b"]), (OneHotEncoder(), ["c"]))
FEW = {"n_estimators": 4, "num_leaves": 5, "verbose": -1, "n_jobs": 1}
ONCE = {"epochs": 1, "random_state": 3, "n_threads": 1, "members": 3}
SPLITS = [(np.arange(200), np.arange(200, 300)), (np.arange(100, 300), np.arange(100))]
EACH = {"source": 0.4, "drawn": 0.1, "random": 0.2, "linear": 0.1, "perceptrons": 0.2}


@pytest.mark.parametrize("labels", [2, 3])
def test_members_are_one_sum_of_scores(labels, tmp_path, monkeypatch):
    monkeypatch.setattr("mlsys_windtunnel.finetune.members._weighed", lambda *a: _Weights(list(EACH.values())))
    target = np.digitize(VALUE, np.quantile(VALUE, np.linspace(0, 1, labels + 1)[1:-1]))
    source = make_pipeline(COLUMNS, LGBMClassifier(**FEW)).fit(FRAME, target)
    options = {"members": 3, "cv": SPLITS, "groups": None, "options": TrainingOptions(random_state=7)}
    joined = with_members(translate(source), source, FRAME, target, None, **options)
    rows = source[:-1].transform(FRAME)
    drawn = {"subsample": 0.8, "subsample_freq": 1, "colsample_bytree": 0.8}

    def refits(seeds, **more):
        fits = [clone(source[-1]).set_params(random_state=s, **drawn, **more).fit(rows, target) for s in seeds]
        return np.mean([fit.predict(rows, raw_score=True) for fit in fits], axis=0)

    networks = [MLPClassifier(**_perceptron(), random_state=7 + n).fit(rows, target) for n in range(3)]
    linear = LogisticRegression(C=0.3).fit(rows, target).decision_function(rows)
    expected = {
        "source": source[-1].predict(rows, raw_score=True),
        "drawn": refits((7, 8)),
        "random": refits((10,), extra_trees=True),
        "linear": linear,
        "perceptrons": np.mean([_margin(each, rows) for each in networks], axis=0),
    }
    total = sum(EACH[name] * scores for name, scores in expected.items())
    total -= 0 if labels == 2 else total.mean(1, keepdims=True)  # softmax does not see a shift
    got = joined.module.decision_function(FRAME) if labels == 2 else np.log(joined.module.predict_proba(FRAME))
    np.testing.assert_allclose(got - (0 if labels == 2 else got.mean(1, keepdims=True)), total, atol=1e-5)
    assert joined.shares == EACH
    if labels == 2:
        program = load_onnx(export_onnx(joined.module, tmp_path / "m.onnx", methods=["predict_proba"]))
    else:
        program = load_pt2(export_pt2(joined.module, tmp_path / "m.pt2", methods=["predict_proba"]))
    for again in (program, load(save(joined.module, tmp_path / "folder"))):
        np.testing.assert_allclose(again.predict_proba(FRAME), joined.module.predict_proba(FRAME), atol=1e-12)


class _Weights:
    gain, gain_se = 1.0, 0.1

    def __init__(self, weights):
        self.weights = np.array(weights)


def _perceptron():
    from mlsys_windtunnel.finetune.makers import _PERCEPTRON

    return _PERCEPTRON


def _margin(network, rows):
    activations = rows
    for weight, bias in zip(network.coefs_[:-1], network.intercepts_[:-1], strict=True):
        activations = np.maximum(activations @ weight + bias, 0)
    margin = activations @ network.coefs_[-1] + network.intercepts_[-1]
    return margin[:, 0] if margin.shape[1] == 1 else margin


def test_weights_are_found_on_rows_held_out_and_a_linear_world_weighs_lines():
    lines = FRAME.assign(a=FRAME.a * 3)
    value = (lines.a + 2 * lines.b).to_numpy()
    pipeline = make_pipeline(COLUMNS, LGBMRegressor(**FEW))
    model = WindTunnelRegressor(pipeline, **ONCE).fit(lines, value)
    assert sum(model.shares_.values()) == pytest.approx(1)
    assert model.shares_["linear"] + model.shares_["perceptrons"] > 0.9
    assert model.members_gain_[0] > model.members_gain_[1] > 0
    assert model.score(lines, value) > 0.99 > model.source_.score(lines, value)


def test_members_that_gain_nothing_are_not_added(capsys):
    noise = np.random.default_rng(5).normal(size=300)
    pipeline = make_pipeline(COLUMNS, LGBMRegressor(**FEW | {"n_estimators": 1, "learning_rate": 1e-3}))
    model = WindTunnelRegressor(pipeline, **ONCE, verbose=True).fit(FRAME, noise)
    assert model.shares_ == {"source": 1.0}
    np.testing.assert_allclose(model.predict(FRAME), model.source_.predict(FRAME), atol=1e-12)
    assert "nothing surely gained, none added" in capsys.readouterr().err


def test_weights_follow_the_rows_and_stay_at_the_prior_where_those_say_nothing():
    target = torch.from_numpy(VALUE)[:, None]
    prior = np.array([0.5, 0.5, 0.0])

    def found(scores):
        losses = lambda sums: (sums - target).square().mean(1)  # noqa: E731
        return weigh(torch.stack(scores), losses, prior, row_weights=torch.ones(300), guess=float(target.var()))

    assert found([target * 0, target * 0, target]).weights[2] > 0.98
    same = found([target * 0.5] * 3)
    np.testing.assert_allclose(same.weights, prior, atol=1e-6)
    assert (same.gain, same.gain_se) == pytest.approx((0, 0), abs=1e-12)


@pytest.mark.parametrize("fit", [fit_linear, fit_perceptron])
@pytest.mark.parametrize("as_table", [np.asarray, csr_array])
def test_networks_read_columns_as_they_are(fit, as_table):
    shift = 0 if as_table is csr_array else 5e4  # sparse columns are not shifted, so that zeros stay
    columns = np.column_stack([FRAME.a * 1e3 + shift, FRAME.c == "x", np.full(300, 7.0)])
    scaling = Scaling.of(as_table(columns))
    layers = fit(scaling, as_table(columns), VALUE * 50 + 1e4, None, 0, is_classifier=False)
    scaled = scaling.apply(as_table(columns))
    from sklearn.linear_model import Ridge

    value = VALUE * 50 + 1e4
    if fit is fit_linear:
        expected = Ridge(3.0).fit(scaled, value).predict(scaled)
    else:
        mean, spread = value.mean(), value.std()
        network = MLPRegressor(**_perceptron(), random_state=0).fit(scaled, (value - mean) / spread)
        expected = mean + spread * network.predict(scaled)
    got = layers(torch.from_numpy(columns)).detach().numpy()[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.corrcoef(got, VALUE)[0, 1] > 0.5


def test_a_network_never_leaves_the_bounds_of_its_training_rows():
    lines = (FRAME.a + 2 * FRAME.b).to_numpy()
    columns = FRAME[["a", "b"]]
    model = WindTunnelRegressor(LGBMRegressor(**FEW), **ONCE).fit(columns, lines)
    assert model.shares_["linear"] > 0
    far = columns.iloc[:1].assign(a=1e9)
    near = columns.iloc[:1].assign(a=columns.a.max())
    np.testing.assert_allclose(model.predict(far), model.predict(near), rtol=1e-12)
    assert np.isfinite(model.predict(columns.iloc[:1].assign(a=np.nan))).all()


def test_what_training_changed_stays_beside_members():
    pipeline = make_pipeline(COLUMNS, LGBMRegressor(**FEW))
    options = {**ONCE, "validation_fraction": 0}
    alone = WindTunnelRegressor(pipeline, **{**options, "members": 0}).fit(FRAME, VALUE)
    model = WindTunnelRegressor(pipeline, **options).fit(FRAME, VALUE)
    assert model.best_epoch_ == alone.best_epoch_ == 1
    untrained = WindTunnelRegressor(pipeline, **{**options, "validation_fraction": 0.1, "lr": 1e-9})
    beside = untrained.fit(FRAME, VALUE).predict(FRAME) - alone.source_.predict(FRAME)
    np.testing.assert_allclose(model.predict(FRAME), alone.predict(FRAME) + beside, atol=1e-4)
    assert np.abs(beside).max() > 1e-3
    assert model.partial_fit(FRAME, VALUE).predict(FRAME).shape == (300,)


def test_boosters_of_scikit_learn_have_members_too():
    pipeline = HistGradientBoostingRegressor(max_iter=3)
    model = WindTunnelRegressor(pipeline, **ONCE).fit(FRAME[["a", "b"]], VALUE)
    assert "random" not in model.shares_
    assert model.score(FRAME[["a", "b"]], VALUE) > model.source_.score(FRAME[["a", "b"]], VALUE)


def test_links_other_than_the_identity_have_refits_alone():
    pipeline = LGBMRegressor(objective="poisson", **FEW)
    model = WindTunnelRegressor(pipeline, **ONCE).fit(FRAME[["a", "b"]], np.exp(VALUE))
    assert model.shares_.keys() <= {"source", "drawn", "random"}
    assert (model.predict(FRAME[["a", "b"]]) > 0).all()


def test_one_member_is_one_refit():
    model = WindTunnelRegressor(LGBMRegressor(**FEW), **ONCE | {"members": 1}).fit(FRAME[["a", "b"]], VALUE)
    assert "random" not in model.shares_
    assert "perceptrons" in model.shares_


def test_refits_draw_where_the_source_does_not():
    assert drawn_options(LGBMRegressor(subsample=0.5), 3) == {
        "random_state": 3,
        "colsample_bytree": 0.8,
        "subsample_freq": 1,
    }


@pytest.mark.parametrize(
    ("pipeline", "options", "reason"),
    [
        (LogisticRegression(), {}, "LogisticRegression as it is fitted here is none such"),
        (RandomForestClassifier(3), {}, "RandomForestClassifier as it is fitted here is none such"),
        (LGBMClassifier(**FEW), {"members": -1}, "members is -1"),
        (LGBMClassifier(**FEW), {"init": "source", "validation_fraction": 0}, "which init='residual' keeps"),
    ],
)
def test_pipelines_without_boosted_trees_are_refused(pipeline, options, reason):
    model = WindTunnelClassifier(pipeline, **{**ONCE, **options})
    with pytest.raises(InvalidInputError, match=reason):
        model.fit(FRAME[["a", "b"]], VALUE > 0)
