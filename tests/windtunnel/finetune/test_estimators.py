"""The fine-tuning estimators as scikit-learn's own checks and searches use them."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor, fine_tune, translate
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, TimeSeriesSplit
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

SMALL = {"epochs": 1, "random_state": 0}
# Batches are drawn of rows, so a row of weight 2 is not two rows; scikit-learn's own stochastic models fail it too.
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": "training is stochastic"}


@parametrize_with_checks(
    [
        WindTunnelClassifier(HistGradientBoostingClassifier(max_iter=2), **SMALL),
        WindTunnelRegressor(HistGradientBoostingRegressor(max_iter=5), **SMALL),
    ],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learns_checks(estimator: object, check: object) -> None:
    check(estimator)


def table(num_rows: int = 300) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(40, 9, num_rows), "city": rng.choice(["Bern", "Oslo", "Rome"], num_rows)})
    return frame, np.where(frame.age + 9 * (frame.city == "Rome") + rng.normal(0, 4, num_rows) > 45, "stay", "go")


def pipeline() -> object:
    columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["city"]))
    return make_pipeline(columns, HistGradientBoostingClassifier(max_iter=5, max_leaf_nodes=8))


def test_a_pipeline_of_text_columns_is_trained_cloned_and_pickled() -> None:
    x, y = table()
    model = clone(WindTunnelClassifier(pipeline(), "L4", epochs=2, min_gain_se=1, random_state=1))
    model.fit(x, y, eval_set=(x[:100], y[:100]), sample_weight=np.linspace(0.5, 1, len(y)))
    assert model.feature_names_in_.tolist() == ["age", "city"]
    assert [entry["epoch"] for entry in model.history_] == [0, 1, 2]
    assert model.best_score_ == max(entry["valid_score"] for entry in model.history_)
    assert model.score(x, y) > 0.7
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict_proba(x), model.predict_proba(x))
    again = clone(model).fit(x, y, eval_set=(x[:100], y[:100]), sample_weight=np.linspace(0.5, 1, len(y)))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


def test_grid_search_over_level_and_rate() -> None:
    x, y = table(200)
    search = GridSearchCV(
        WindTunnelClassifier(pipeline(), **SMALL), {"level": ["L1", "L3"], "lr": [1e-3, 1e-2]}, cv=2, scoring="roc_auc"
    )
    search.fit(x, y)
    assert search.best_score_ > 0.6
    assert search.best_params_["level"] in ("L1", "L3")


def test_a_frozen_pipeline_is_adapted_to_new_rows_as_it_is() -> None:
    x, y = table()
    source = pipeline().fit(x[:150], y[:150])
    model = WindTunnelClassifier(FrozenEstimator(source), **SMALL, validation_fraction=0).fit(x[150:], y[150:])
    assert model.best_epoch_ == 1
    before, after = source.predict_proba(x), model.predict_proba(x)
    assert 1e-6 < np.abs(before - after).max() < 0.3


def test_a_regression_pipeline_gets_better_where_its_trees_were_stopped_early() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = 3 * x[:, 0] + x[:, 1] ** 2
    options = {"epochs": 20, "lr": 0.02, "min_gain_se": 1, "random_state": 0}
    model = WindTunnelRegressor(GradientBoostingRegressor(n_estimators=10), "L2", **options)
    model.fit(x[:400], y[:400])
    assert model.score(x[400:], y[400:]) > model.source_.score(x[400:], y[400:]) + 0.05


@pytest.mark.parametrize("name", ["level", "gate", "init", "scope", "schedule", "loss", "metric"])
def test_an_unknown_choice_is_named(name: str) -> None:
    x, y = table(100)
    with pytest.raises(InvalidInputError, match=f"{name} is 'none such'"):
        WindTunnelClassifier(pipeline(), **{name: "none such"}).fit(x, y)


def test_what_pays_is_chosen_on_rows_held_out_and_learnt_from_all() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = 3 * x[:, 0] + x[:, 1] ** 2
    small = GradientBoostingRegressor(n_estimators=10, random_state=0)
    model = WindTunnelRegressor(small, "L2", epochs=8, lr=0.02, random_state=0, cv=3).fit(x, y)
    assert 0 < model.best_epoch_ <= 8
    assert model.gain_ > model.gain_se_ > 0
    assert [entry["epoch"] for entry in model.history_] == list(range(9)), "means over the folds"
    np.testing.assert_array_equal(model.source_.predict(x), clone(small).fit(x, y).predict(x))
    assert model.score(x, y) > model.source_.score(x, y) + 0.05


@pytest.mark.parametrize("cv", [None, TimeSeriesSplit(3)])
def test_where_nothing_is_gained_answers_are_those_of_the_pipeline_fitted_on_all_rows(cv, capsys) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = (x[:, 0] + rng.normal(size=400) > 0).astype(int)
    source = LogisticRegression()  # has its optimum already
    model = WindTunnelClassifier(source, epochs=2, lr=0.3, random_state=0, cv=cv, verbose=True).fit(x, y)
    assert model.best_epoch_ == 0
    np.testing.assert_allclose(model.predict_proba(x), source.fit(x, y).predict_proba(x), atol=1e-12)
    assert "nothing surely gained, the pipeline answers as it was fitted" in " ".join(capsys.readouterr().err.split())


def test_groups_stay_together_and_need_a_splitter() -> None:
    x, y = table()
    groups = np.arange(len(y)) % 7
    seen = []

    class Watched(GroupKFold):
        def split(self, x, y=None, groups=None):
            for kept, held in super().split(x, y, groups):
                seen.append(set(groups[kept]) & set(groups[held]))
                yield kept, held

    WindTunnelClassifier(pipeline(), **SMALL, cv=Watched(3)).fit(x, y, groups=groups)
    assert seen == [set()] * 3
    with pytest.raises(InvalidInputError, match="give cv=GroupKFold"):
        WindTunnelClassifier(pipeline(), **SMALL).fit(x, y, groups=groups)


def test_rows_in_parts_and_a_warm_start_go_on_from_what_there_is() -> None:
    x, y = table(600)
    model = WindTunnelClassifier(pipeline(), lr=2e-2, random_state=0, validation_fraction=0, epochs=1)
    with pytest.raises(InvalidInputError, match=r"the first rows have no \['go'\]"):
        model.partial_fit(x[y == "stay"], y[y == "stay"], classes=["go", "stay"])
    model.partial_fit(x[:200], y[:200], classes=["go", "stay"])
    source, before = model.source_, log_loss(y[200:], model.predict_proba(x[200:]))
    for start in (200, 400):
        model.partial_fit(x[start : start + 200], y[start : start + 200])
    assert model.source_ is source
    after = log_loss(y[200:], model.predict_proba(x[200:]))
    assert after < before
    with pytest.raises(InvalidInputError, match="'maybe', which the pipeline does not know"):
        model.partial_fit(x[:10], ["maybe"] * 10)
    model.set_params(warm_start=True).fit(x[200:], y[200:])
    assert model.source_ is source
    assert log_loss(y[200:], model.predict_proba(x[200:])) < after


def test_training_that_stops_early_is_the_beginning_of_the_whole() -> None:
    x, y = table()
    start = translate(pipeline().fit(x, y))
    whole = fine_tune(start, x, y, epochs=4).history
    part = fine_tune(start, x, y, epochs=4, last_epoch=2).history
    assert [(each["train_loss"], each["lr"]) for each in part[1:]] == [
        (each["train_loss"], each["lr"]) for each in whole[1:3]
    ]


@pytest.mark.parametrize(
    "last",
    [MultiOutputRegressor(LGBMRegressor(n_estimators=8, num_leaves=6, verbose=-1, n_jobs=1)), Ridge()],
    ids=["a model each", "one model"],
)
def test_several_numbers_a_row_are_learnt(last):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 4))
    y = np.stack([np.sin(2 * x[:, 0]) + x[:, 1], x[:, 2] * x[:, 3]], axis=1)
    model = WindTunnelRegressor(make_pipeline(StandardScaler(), last), epochs=2, random_state=0)
    model.fit(x[:400], y[:400])
    assert model.predict(x[400:]).shape == (100, 2)
    assert model.score(x[400:], y[400:]) >= model.source_.score(x[400:], y[400:]) - 0.01
    before = model.predict(x[400:])
    model.partial_fit(x[400:], y[400:])
    assert not np.array_equal(model.predict(x[400:]), before)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(x, np.where(y > 2, np.nan, y))


def test_a_classifier_of_several_outputs_is_refused_by_name():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), rng.integers(2, size=(60, 2))
    source = RandomForestClassifier(2)
    with pytest.raises(InvalidInputError, match=r"2 labels a row.*RandomForestClassifier of several outputs"):
        WindTunnelClassifier(source).fit(x, y)
    with pytest.raises(InvalidInputError, match="kind multilabel"):
        fine_tune(translate(source.fit(x, y)), x, y)
