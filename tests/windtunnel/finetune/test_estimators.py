"""The fine-tuning estimators as scikit-learn's own checks and searches use them."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
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
    model = clone(WindTunnelClassifier(pipeline(), "L4", epochs=2, random_state=1))
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
    model = WindTunnelRegressor(GradientBoostingRegressor(n_estimators=10), "L2", epochs=20, lr=0.02, random_state=0)
    model.fit(x[:400], y[:400])
    assert model.score(x[400:], y[400:]) > model.source_.score(x[400:], y[400:]) + 0.05


@pytest.mark.parametrize("name", ["level", "gate", "init", "scope", "schedule", "loss", "metric"])
def test_an_unknown_choice_is_named(name: str) -> None:
    x, y = table(100)
    with pytest.raises(InvalidInputError, match=f"{name} is 'none such'"):
        WindTunnelClassifier(pipeline(), **{name: "none such"}).fit(x, y)
