"""scikit-learn's gradient boosting answers the same after translation, over trees and over histograms."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.linear_model import LinearRegression

SMALL = {"n_estimators": 12, "random_state": 0}
HISTOGRAM = {"max_iter": 12, "min_samples_leaf": 4, "random_state": 0}


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 4))


@pytest.fixture
def fresh() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(200, 4))


def _labels(x: np.ndarray, names: list) -> np.ndarray:
    return np.array(names)[np.digitize(x[:, 0] + x[:, 1] * x[:, 2], np.linspace(-1, 1, len(names) - 1))]


@pytest.mark.parametrize("init", [None, "zero", DummyClassifier(strategy="most_frequent")])
@pytest.mark.parametrize(("loss", "names"), [("log_loss", "ab"), ("exponential", "ab"), ("log_loss", "abcd")])
def test_classifiers_over_trees(same_answers, x, fresh, init, loss, names):
    source = GradientBoostingClassifier(loss=loss, init=init, **SMALL)
    is_saturated = isinstance(init, DummyClassifier)  # it starts at the logit of 1 - eps, where gradients vanish
    same_answers(source.fit(x, _labels(x, list(names))), fresh, trained=not is_saturated)


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "huber", "quantile"])
@pytest.mark.parametrize("init", [None, "zero"])
def test_regressors_over_trees(same_answers, x, fresh, loss, init):
    same_answers(GradientBoostingRegressor(loss=loss, init=init, **SMALL).fit(x, x[:, 0] ** 2), fresh)


def test_a_decision_of_zero_is_the_second_class_over_trees_and_the_first_over_histograms(same_answers):
    """Two rows that differ in their labels only: all leaves are 0."""
    x, y = np.zeros((40, 1)), np.array([0, 1] * 20)
    over_trees = same_answers(GradientBoostingClassifier(init="zero", **SMALL).fit(x, y), x[:1])
    assert over_trees.predict(x[:1]).tolist() == [1]
    assert over_trees.decision_function(x[:1]).tolist() == [0.0]
    over_histograms = same_answers(HistGradientBoostingClassifier(**HISTOGRAM).fit(x, y), x[:1])
    assert over_histograms.predict(x[:1]).tolist() == [0]


def test_an_init_that_looks_at_its_input_is_refused_by_name(x):
    source = GradientBoostingRegressor(init=LinearRegression(), **SMALL).fit(x, x[:, 0])
    with pytest.raises(InvalidInputError, match="GradientBoostingRegressor"):
        translate(source)
    by_chance = GradientBoostingClassifier(init=DummyClassifier(strategy="stratified"), **SMALL)
    with pytest.raises(InvalidInputError, match="GradientBoostingClassifier"):
        translate(by_chance.fit(x, x[:, 0] > 0))


@pytest.mark.parametrize("names", [["no", "yes"], [2, 0, 1]])
def test_classifiers_over_histograms(same_answers, x, fresh, names):
    same_answers(HistGradientBoostingClassifier(**HISTOGRAM).fit(x, _labels(x, names)), fresh)


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "gamma", "poisson", "quantile"])
def test_regressors_over_histograms(same_answers, x, fresh, loss):
    source = HistGradientBoostingRegressor(loss=loss, quantile=0.7, **HISTOGRAM)
    same_answers(source.fit(x, x[:, 0] ** 2 + 0.1), fresh)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_missing_values_and_infinities_over_histograms(same_in_each_layout, x, fresh, share):
    """A split may part missing from all others, infinities too: its threshold is then infinite."""
    rng = np.random.default_rng(0)
    x[rng.random(x.shape) < share] = np.nan
    x[:, 3] = np.where(rng.random(300) < share, np.nan, 1.0)
    y = np.nan_to_num(x[:, 0]) + np.isnan(x[:, 3]) * 3
    source = HistGradientBoostingRegressor(**HISTOGRAM).fit(x, y)
    special = [np.nan, np.inf, -np.inf, 0.0]
    fresh = np.where(rng.random(fresh.shape) < 0.4, rng.choice(special, fresh.shape), fresh)
    module = same_in_each_layout(source, fresh)
    (trees,) = (part for part in module.modules() if isinstance(part, Trees))
    assert np.isinf(trees.ensemble.threshold).any() == (share > 0)


def test_ties_at_thresholds(same_answers):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (300, 3)).astype(float)
    halves = rng.integers(0, 12, (100, 3)) / 2
    rows = np.concatenate([halves, np.nextafter(halves, 9), np.nextafter(halves, -9)])
    for source in (GradientBoostingRegressor(**SMALL), HistGradientBoostingRegressor(**HISTOGRAM)):
        same_answers(source.fit(x, x.sum(1) ** 2), rows)


def test_categories_that_are_numbers_are_coded_in_the_network(same_in_each_layout, x, fresh):
    """Columns change their order within the source: categories come first."""
    rng = np.random.default_rng(0)
    x[:, 1], x[:, 3] = rng.choice([7.0, -1.0, 2.5, np.nan], 300), rng.integers(0, 12, 300)
    y = x[:, 0] + (x[:, 1] == 2.5) * 2 + (x[:, 3] % 3 == 0)
    source = HistGradientBoostingRegressor(categorical_features=[1, 3], **HISTOGRAM).fit(x, y)
    fresh[:, 1] = rng.choice([7.0, -1.0, 2.5, np.nan, 2.4, 1e300, -9], 200)
    fresh[:, 3] = rng.choice([*range(14), 0.5, np.nan], 200)
    module = same_in_each_layout(source, fresh)
    assert module.frontend.is_trivial
    (trees,) = (part for part in module.modules() if isinstance(part, Trees))
    assert trees.ensemble.categorical_features.tolist() == [0, 1]


def _frame(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "number": rng.normal(size=300),
            "city": pd.Categorical(rng.choice(["rome", "oslo", "bonn", None], 300)),
            "whole": rng.integers(0, 5, 300),
            "code": pd.Categorical(rng.choice([10, 30, 20], 300)),
        }
    )


@pytest.mark.parametrize("kind", [HistGradientBoostingClassifier, HistGradientBoostingRegressor])
def test_pandas_categories_are_coded_on_the_host(same_answers, kind):
    frame, fresh = _frame(0), _frame(1)
    target = frame.number + (frame.city == "oslo") * 2 + (frame.code.astype(int) == 30)
    source = kind(**HISTOGRAM).fit(frame, (target > 1).astype(int))
    fresh["city"] = pd.Categorical(fresh.city.astype(object).where(fresh.number < 1, "lima"))  # never seen
    fresh.loc[::7, "number"] = np.nan
    module = same_answers(source, fresh)
    assert not module.frontend.is_trivial
    loaded = pickle.loads(pickle.dumps(module))
    np.testing.assert_array_equal(loaded.predict(fresh), source.predict(fresh))


def test_pandas_categories_of_numbers_only(same_answers):
    frame, fresh = _frame(0)[["number", "code"]], _frame(1)[["number", "code"]]
    source = HistGradientBoostingRegressor(**HISTOGRAM).fit(frame, frame.number + (frame.code.astype(int) == 30))
    assert same_answers(source, fresh).frontend.is_trivial


def test_text_categories_in_an_array_of_objects(same_answers):
    frame, fresh = _frame(0), _frame(1)
    source = HistGradientBoostingRegressor(categorical_features=[1], **HISTOGRAM)
    x, fresh = (table[["number", "city"]].astype(object).fillna("none").to_numpy() for table in (frame, fresh))
    same_answers(source.fit(x, frame.number + (frame.city == "oslo")), fresh)


def test_inputs_of_other_kinds(same_answers, x, fresh):
    for source in (
        GradientBoostingClassifier(**SMALL),
        HistGradientBoostingClassifier(**HISTOGRAM),
        GradientBoostingRegressor(**SMALL),
        HistGradientBoostingRegressor(**HISTOGRAM),
    ):
        named = pd.DataFrame(x, columns=list("abcd"))
        same_answers(source.fit(named, x[:, 0] > 0), pd.DataFrame(fresh, columns=list("abcd")))
        same_answers(source.fit(x, x[:, 0] > 0), fresh.astype(np.float32))
        same_answers(source, fresh[:1])
        same_answers(source.fit(x[:, :1], x[:, 0] > 0), fresh[:, :1])
    same_answers(GradientBoostingRegressor(**SMALL).fit(x, x[:, 0]), scipy.sparse.csr_matrix(fresh))


def test_early_stopping(same_answers, x, fresh):
    y = _labels(x, [0, 1, 2])
    for source in (
        GradientBoostingClassifier(n_iter_no_change=2, tol=0.05, n_estimators=50),
        HistGradientBoostingClassifier(early_stopping=True, n_iter_no_change=2, tol=0.05, max_iter=50),
    ):
        same_answers(source.fit(x, y), fresh)
