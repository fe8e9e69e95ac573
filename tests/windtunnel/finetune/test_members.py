"""Refits beside the pipeline's own trees: the mean of their margins, one ensemble, that is saved and trained on."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": RNG.normal(size=300), "b": RNG.normal(size=300), "c": RNG.choice(["x", "y", "z"], 300)})
VALUE = (FRAME.a * 2 + (FRAME.c == "x") + RNG.normal(size=300)).to_numpy()
COLUMNS = make_column_transformer((StandardScaler(), ["a", "b"]), (OneHotEncoder(), ["c"]))
FEW = {"n_estimators": 4, "num_leaves": 5, "verbose": -1, "n_jobs": 1}
ONCE = {"epochs": 1, "random_state": 3, "n_threads": 1, "members": 3}


@pytest.mark.parametrize("labels", [2, 3])
def test_members_share_half_of_the_weight(labels, tmp_path):
    target = np.digitize(VALUE, np.quantile(VALUE, np.linspace(0, 1, labels + 1)[1:-1]))
    pipeline = make_pipeline(COLUMNS, LGBMClassifier(**FEW))
    model = WindTunnelClassifier(pipeline, validation_fraction=0.1, min_gain_se=1e6, **ONCE).fit(FRAME, target)
    assert model.best_epoch_ == 0
    source, seed = model.source_, model._options()[1].random_state
    rows = source[:-1].transform(FRAME)
    drawn = {"subsample": 0.8, "subsample_freq": 1, "colsample_bytree": 0.8}
    fits = [clone(source[-1]).set_params(random_state=seed + each, **drawn).fit(rows, target) for each in range(3)]
    members = np.mean([fit.predict(rows, raw_score=True) for fit in fits], axis=0)
    margin = 0.5 * source[-1].predict(rows, raw_score=True) + 0.5 * members
    np.testing.assert_allclose(model.decision_function(FRAME), margin, atol=1e-9)
    (trees,) = (part for part in model.module_.modules() if isinstance(part, Trees))
    assert trees.ensemble.num_trees == 4 * 4 * (labels if labels > 2 else 1)
    again = load(save(model.module_, tmp_path))
    np.testing.assert_allclose(again.predict_proba(FRAME), model.predict_proba(FRAME), atol=1e-9)


def test_what_training_changed_stays_beside_members():
    pipeline = make_pipeline(COLUMNS, LGBMRegressor(**FEW))
    options = {**ONCE, "validation_fraction": 0}
    alone = WindTunnelRegressor(pipeline, **{**options, "members": 0}).fit(FRAME, VALUE)
    model = WindTunnelRegressor(pipeline, **options).fit(FRAME, VALUE)
    assert model.best_epoch_ == alone.best_epoch_ == 1
    untrained = WindTunnelRegressor(pipeline, **{**options, "validation_fraction": 0.1, "min_gain_se": 1e6})
    beside = untrained.fit(FRAME, VALUE).predict(FRAME) - alone.source_.predict(FRAME)
    np.testing.assert_allclose(model.predict(FRAME), alone.predict(FRAME) + beside, atol=1e-5)
    assert np.abs(beside).max() > 1e-3
    assert model.partial_fit(FRAME, VALUE).predict(FRAME).shape == (300,)


def test_boosters_of_scikit_learn_have_members_too():
    pipeline = HistGradientBoostingRegressor(max_iter=3)
    model = WindTunnelRegressor(pipeline, min_gain_se=1e6, **ONCE).fit(FRAME[["a", "b"]], VALUE)
    assert np.corrcoef(model.predict(FRAME[["a", "b"]]), VALUE)[0, 1] > 0.5


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
