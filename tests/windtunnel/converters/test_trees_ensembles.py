"""Isolation forests, and bagging and AdaBoost over decision trees, answer the same after translation."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_windtunnel.convert.registry import Unsupported
from mlsys_windtunnel.convert.trees_ensembles import (
    ada_boost_classifier,
    ada_boost_regressor,
    bagging_classifier,
    bagging_regressor,
)
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.ensemble import (
    AdaBoostClassifier,
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    IsolationForest,
)
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier

SMALL = {"n_estimators": 9, "random_state": 0}


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 5))


@pytest.fixture
def fresh() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(200, 5)) * 2


def _labels(x: np.ndarray, names: list) -> np.ndarray:
    return np.array(names)[np.digitize(x[:, 0] + x[:, 1] * x[:, 2], np.linspace(-1, 1, len(names) - 1))]


@pytest.mark.parametrize(
    "options", [{}, {"contamination": 0.1}, {"max_features": 2}, {"bootstrap": True}, {"max_samples": 1}]
)
def test_isolation_forests(same_answers, x, fresh, options):
    source = IsolationForest(**SMALL, **options).fit(x)
    module = same_answers(source, fresh, trained=options != {"max_samples": 1})
    np.testing.assert_allclose(module.score_samples(x), source.score_samples(x), rtol=0, atol=1e-14)
    assert module.predict(fresh).dtype == source.predict(fresh).dtype


def test_isolation_forests_on_missing_values(same_answers, x, fresh):
    x[::5, 1] = fresh[::3, 1] = np.nan
    same_answers(IsolationForest(contamination=0.2, **SMALL).fit(x), fresh)


@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("options", [{}, {"max_features": 2}, {"bootstrap_features": True}, {"max_samples": 4}])
def test_bagged_classifiers(same_answers, x, fresh, names, options):
    source = BaggingClassifier(**SMALL, **options).fit(x, _labels(x, list(names)))
    same_answers(source, fresh)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("options", [{}, {"max_features": 2}])
def test_bagged_regressors(same_answers, x, fresh, outputs, options):
    same_answers(BaggingRegressor(**SMALL, **options).fit(x, x[:, 0] if outputs is None else x[:, :2]), fresh)


@pytest.mark.parametrize("names", [["no", "yes"], [3, 1, 2], [False, True]])
@pytest.mark.parametrize("tree", [None, DecisionTreeClassifier(max_depth=3), ExtraTreeClassifier(max_depth=2)])
def test_boosted_classifiers(same_answers, x, fresh, names, tree):
    same_answers(AdaBoostClassifier(tree, **SMALL).fit(x, _labels(x, names)), fresh)


def test_boosting_that_ends_early(same_answers, x, fresh):
    source = AdaBoostClassifier(DecisionTreeClassifier(), **SMALL).fit(x, _labels(x, [0, 1]))
    assert len(source.estimators_) < len(source.estimator_weights_)
    same_answers(source, fresh)


@pytest.mark.parametrize(
    "source",
    [
        AdaBoostClassifier(DecisionTreeClassifier(max_depth=3), **SMALL),
        AdaBoostRegressor(**SMALL),
        BaggingClassifier(**SMALL),
        BaggingRegressor(**SMALL),
    ],
    ids=lambda source: type(source).__name__,
)
def test_inputs_are_rounded_as_the_trees_round_them(same_answers, source):
    """Whole numbers in training put thresholds at halves; what lies beside one by less than a float32 counts as it."""
    x = np.random.default_rng(2).integers(0, 6, size=(200, 3)).astype(float)
    halves = np.random.default_rng(3).integers(0, 5, size=(100, 3)) + 0.5
    rows = np.concatenate([halves, np.nextafter(halves, 9), np.nextafter(halves, -9)])
    same_answers(source.fit(x, (x[:, 0] + x[:, 1] > 5).astype(int)), rows)


@pytest.mark.parametrize("loss", ["linear", "square", "exponential"])
@pytest.mark.parametrize("depth", [1, 4])
def test_boosted_regressors(same_answers, x, fresh, loss, depth):
    source = AdaBoostRegressor(DecisionTreeRegressor(max_depth=depth), loss=loss, **SMALL)
    same_answers(source.fit(x, x[:, 0] ** 2), fresh)


@pytest.mark.parametrize(
    ("converter", "source"),
    [
        (ada_boost_classifier, AdaBoostClassifier(**SMALL)),
        (ada_boost_regressor, AdaBoostRegressor(**SMALL)),
        (bagging_classifier, BaggingClassifier(**SMALL)),
        (bagging_regressor, BaggingRegressor(**SMALL)),
    ],
)
def test_trees_become_one_ensemble(x, converter, source):
    module = converter(source.fit(x, (x[:, 0] > 0).astype(int)))
    (trees,) = (part for part in module.modules() if isinstance(part, Trees))
    assert len(trees.root) == len(source.estimators_)


@pytest.mark.parametrize(
    ("converter", "source"),
    [
        (ada_boost_classifier, AdaBoostClassifier(LogisticRegression(), **SMALL)),
        (ada_boost_regressor, AdaBoostRegressor(LinearRegression(), **SMALL)),
        (bagging_classifier, BaggingClassifier(LogisticRegression(), **SMALL)),
        (bagging_regressor, BaggingRegressor(LinearRegression(), **SMALL)),
    ],
)
def test_other_members_are_declined(x, converter, source):
    assert isinstance(converter(source.fit(x, (x[:, 0] > 0).astype(int))), Unsupported)
