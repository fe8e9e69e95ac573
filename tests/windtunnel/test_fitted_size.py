"""Parameters, trees and leaves, counted against each library's own account."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightgbm import LGBMClassifier
from mlsys_windtunnel import FittedSize
from mlsys_windtunnel.parse.fitted_size import fitted_size
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
    VotingClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier

rng = np.random.default_rng(0)
X = rng.normal(size=(80, 5))
y = (X[:, 0] + X[:, 1] > 0).astype(int)


@pytest.mark.parametrize(
    ("estimator", "num_parameters"),
    [
        (StandardScaler(), 15),  # mean, variance, scale
        (LogisticRegression(), 6),
        (GaussianNB(), 10 + 10 + 2 + 1 + 2),  # means, variances, priors, epsilon, and counts
        (KNeighborsClassifier(), 80 * 5 + 80),  # keeps the data
        (FunctionTransformer(np.abs), 0),
        (VotingClassifier([("a", GaussianNB()), ("b", make_pipeline(StandardScaler(), GaussianNB()))]), 25 + 15 + 25),
        (CalibratedClassifierCV(LogisticRegression(), cv=2), 2 * (6 + 2)),  # two models, two sigmoids of a and b
    ],
)
def test_numbers_kept(estimator: Any, num_parameters: int):
    assert fitted_size(estimator.fit(X, y)) == FittedSize(num_parameters)


def test_categories_are_counted_whatever_their_type():
    words = np.array([["a", 1], ["b", 2], ["c", 1]], dtype=object)
    assert fitted_size(OneHotEncoder().fit(words)).num_parameters == 3 + 2
    assert fitted_size(OneHotEncoder().fit([[1], [2], [3]])).num_parameters == 3


def test_a_tree_counts_splits_and_leaf_values():
    tree = DecisionTreeClassifier(max_leaf_nodes=4, random_state=0).fit(X, y)
    assert fitted_size(tree) == FittedSize(3 + 4 * 2, 1, 4)


def test_forests_count_each_tree_once():
    forest = RandomForestClassifier(7, random_state=0).fit(X, y)
    size = fitted_size(forest)
    assert (size.num_trees, size.num_leaves) == (7, sum(tree.get_n_leaves() for tree in forest.estimators_))
    isolation = IsolationForest(n_estimators=6, random_state=0).fit(X)
    assert fitted_size(isolation).num_leaves == sum(tree.get_n_leaves() for tree in isolation.estimators_)
    boosted = GradientBoostingClassifier(n_estimators=5, random_state=0).fit(X, np.arange(80) % 3)
    assert fitted_size(boosted).num_trees == 15


def test_histogram_boosting():
    model = HistGradientBoostingClassifier(max_iter=4, min_samples_leaf=5).fit(X, y)
    size = fitted_size(model)
    num_leaves = sum(predictor.get_n_leaf_nodes() for (predictor,) in model._predictors)
    assert size == FittedSize(2 * num_leaves - 4 + 1, 4, num_leaves)  # splits, leaves and the baseline


def test_lightgbm():
    model = LGBMClassifier(n_estimators=5, min_child_samples=3, verbose=-1).fit(X, y)
    frame = model.booster_.trees_to_dataframe()
    num_leaves = int(frame["left_child"].isna().sum())
    assert fitted_size(model) == FittedSize(len(frame), 5, num_leaves)


def test_an_estimator_that_holds_itself_is_counted_once():
    model = LogisticRegression().fit(X, y)
    model.copies_ = [model, model]
    assert fitted_size(model).num_parameters == 6
