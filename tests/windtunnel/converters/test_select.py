"""Selectors give the columns that they chose, in order, untouched."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
from mlsys_windtunnel.convert.translation import translate
from sklearn import feature_selection
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

RNG = np.random.default_rng(5)
X, FRESH = RNG.normal(size=(90, 6)), RNG.normal(size=(20, 6))
LABELS = np.where(X[:, 1] - X[:, 4] + 0.1 * RNG.normal(size=90) > 0, "yes", "no")
NUMBERS = X[:, 1] - X[:, 4]

SELECTORS = [
    feature_selection.SelectKBest(k=3),
    feature_selection.SelectKBest(feature_selection.mutual_info_classif, k="all"),
    feature_selection.SelectPercentile(percentile=40),
    feature_selection.SelectFpr(),
    feature_selection.SelectFdr(),
    feature_selection.SelectFwe(),
    feature_selection.GenericUnivariateSelect(mode="k_best", param=2),
    feature_selection.VarianceThreshold(0.9),
    feature_selection.SelectFromModel(LogisticRegression(), max_features=2),
    feature_selection.RFE(LogisticRegression(), n_features_to_select=2),
    feature_selection.RFECV(LogisticRegression(), cv=2),
    feature_selection.SequentialFeatureSelector(LogisticRegression(), n_features_to_select=2, cv=2),
]


@pytest.mark.parametrize("source", SELECTORS, ids=lambda source: type(source).__name__)
def test_selectors(same_answers, source):
    source.fit(X, LABELS)
    answer = translate(source).transform(FRESH)
    assert 0 < answer.shape[1] <= 6
    np.testing.assert_array_equal(answer, source.transform(FRESH))
    pipeline = make_pipeline(StandardScaler(), source, LogisticRegression()).fit(X, LABELS)
    module = same_answers(pipeline, FRESH)
    assert not module.frontend.fallbacks
    same_answers(pipeline, FRESH[:1])


def test_sparse_and_missing_values(same_answers):
    sparse = scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
    same_answers(feature_selection.VarianceThreshold(0.1).fit(sparse), sparse, trained=False)
    holes = np.where(X > 1, np.nan, X)
    same_answers(feature_selection.VarianceThreshold(0.1).fit(holes), holes, trained=False)


def test_a_model_fitted_before_and_a_choice_of_nothing(same_answers):
    fitted = Ridge().fit(X, NUMBERS)
    same_answers(feature_selection.SelectFromModel(fitted, prefit=True).fit(X), FRESH, trained=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = feature_selection.SelectFromModel(Lasso(100.0), threshold=1.0).fit(X, NUMBERS)
        assert translate(source).transform(FRESH).shape == source.transform(FRESH).shape == (20, 0)
