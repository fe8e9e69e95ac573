"""scikit-learn's trees and forests answer the same after translation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier, ExtraTreeRegressor

ONE_TREE = (DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier, ExtraTreeRegressor)
FORESTS = (ExtraTreesClassifier, ExtraTreesRegressor, RandomForestClassifier, RandomForestRegressor)
CLASSIFIERS = (DecisionTreeClassifier, ExtraTreeClassifier, ExtraTreesClassifier, RandomForestClassifier)
REGRESSORS = (DecisionTreeRegressor, ExtraTreeRegressor, ExtraTreesRegressor, RandomForestRegressor)


def _made(kind, **options):
    forest = {"n_estimators": 7} if kind in FORESTS else {}
    return kind(random_state=0, **forest, **options)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 5))


def _labels(x: np.ndarray, names: list) -> np.ndarray:
    return np.array(names)[np.digitize(x[:, 0] + x[:, 1] * x[:, 2], np.linspace(-1, 1, len(names) - 1))]


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("names", [["no", "yes"], [3, 1, 2], ["only"], [False, True]])
def test_classifiers(same_answers, x, fresh, kind, names):
    same_answers(_made(kind).fit(x, _labels(x, names) if len(names) > 1 else np.full(300, names[0])), fresh)


@pytest.mark.parametrize("kind", REGRESSORS)
@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_regressors_of_one_and_several_outputs(same_answers, x, fresh, kind, outputs):
    y = x[:, 0] ** 2 if outputs is None else np.abs(x[:, :outputs])
    same_answers(_made(kind, min_samples_leaf=3).fit(x, y), fresh)


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS])
@pytest.mark.parametrize("depth", [1, 3, None])
def test_small_and_deep_trees(same_in_each_layout, x, fresh, kind, depth):
    """To the last bit."""
    same_in_each_layout(_made(kind, max_depth=depth).fit(x, _labels(x, [0, 1])), fresh)


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS])
def test_ties_at_thresholds(same_answers, kind):
    """Whole numbers in training put thresholds at halves, which the new rows hit exactly, and miss by one float."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (200, 3)).astype(float)
    halves = rng.integers(0, 12, (100, 3)) / 2
    rows = np.concatenate([halves, np.nextafter(halves, 9), np.nextafter(halves, -9)])
    rows = np.concatenate([rows, np.nextafter(halves.astype(np.float32), np.float32(9))])
    same_answers(_made(kind).fit(x, (x.sum(1) > 7).astype(int)), rows)


@pytest.mark.parametrize("kind", [DecisionTreeClassifier, DecisionTreeRegressor, *FORESTS])
@pytest.mark.parametrize("seen", [True, False])
def test_missing_values_whether_they_were_seen_or_not(same_answers, x, fresh, kind, seen):
    y = _labels(x, [0, 1])
    rng = np.random.default_rng(0)
    if seen:
        x[rng.random(x.shape) < 0.2] = np.nan
        y = np.where(np.isnan(x[:, 0]), 1, y)
    fresh[rng.random(fresh.shape) < 0.2] = np.nan
    source = _made(kind, max_depth=5).fit(x, y)
    if not seen and kind in FORESTS:
        return  # scikit-learn refuses them
    same_answers(source, fresh)


@pytest.mark.parametrize("kind", [*ONE_TREE, *FORESTS])
def test_one_row_one_feature_one_leaf(same_answers, kind):
    same_answers(_made(kind).fit([[0.0], [1.0], [2.0]], [0, 0, 1]), np.array([[1.5]]))
    same_answers(_made(kind, max_depth=1, min_samples_leaf=3).fit([[0.0], [1.0], [2.0]], [0, 0, 1]), np.array([[1.5]]))


def test_float32_is_exact_too(x, fresh):
    source = _made(RandomForestRegressor).fit(x, x[:, 0])
    np.testing.assert_allclose(translate(source, dtype=torch.float32).predict(fresh), source.predict(fresh), rtol=1e-5)


def test_deep_forests_of_many_leaves(same_answers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 4))
    source = RandomForestClassifier(5, random_state=0).fit(x, rng.integers(0, 4, 3000))
    assert max(tree.get_n_leaves() for tree in source.estimators_) > 1000
    same_answers(source, rng.normal(size=(500, 4)))


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("names", [["a", "b", "c"], [5, 3]])
@pytest.mark.parametrize("outputs", [2, 3])
def test_classifiers_of_several_outputs(x, fresh, kind, names, outputs):
    """The first output has two or three classes, the second always two, the third one."""
    y = np.column_stack([_labels(x, names), _labels(-x, names[:2]), np.full(300, names[0])])[:, :outputs]
    source = _made(kind, max_depth=4).fit(x, y)
    module = translate(source)
    assert (module.predict(fresh) == source.predict(fresh)).all()
    assert module.predict(fresh).dtype.kind == np.asarray(names).dtype.kind
    with np.errstate(divide="ignore"):
        for method in ("predict_proba", "predict_log_proba"):
            expected = getattr(source, method)(fresh)
            got = getattr(module, method)(fresh)
            assert [part.shape for part in got] == [part.shape for part in expected]
            for part, wanted in zip(got, expected, strict=True):
                np.testing.assert_allclose(part, wanted, atol=1e-12)
    module(torch.from_numpy(fresh)).square().sum().backward()
    trees = next(part for part in module.modules() if isinstance(part, Trees))
    assert trees.leaf_value.grad.abs().sum() > 0


def test_a_forest_in_a_pipeline_is_loaded_without_scikit_learn(answer_alone, x, fresh):
    source = make_pipeline(StandardScaler(), RandomForestClassifier(5, random_state=0)).fit(x, _labels(x, ["a", "b"]))
    np.testing.assert_allclose(answer_alone(translate(source), fresh), source.predict_proba(fresh), atol=1e-12)
