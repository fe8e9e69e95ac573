"""Discriminant analysis answers as its sources do, and projects where they do."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.covariance import LedoitWolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(5)
X, FRESH = RNG.normal(2, 1, size=(120, 4)) @ RNG.normal(size=(4, 4)), RNG.normal(2, 2, size=(40, 4))
Y = X[:, 0] + 0.5 * X[:, 1] ** 2
LABELS = {
    "two": np.where(np.quantile(Y, 0.4) < Y, "yes", "no"),
    "three": np.array(["low", "middle", "high"])[np.digitize(Y, np.quantile(Y, [0.3, 0.6]))],
    "five": np.digitize(Y, np.quantile(Y, [0.2, 0.4, 0.6, 0.8])) * 10,
}
LDA = [
    LinearDiscriminantAnalysis(),
    LinearDiscriminantAnalysis(n_components=1),
    LinearDiscriminantAnalysis(solver="lsqr"),
    LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    LinearDiscriminantAnalysis(solver="eigen"),
    LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.3, n_components=1),
    LinearDiscriminantAnalysis(solver="eigen", covariance_estimator=LedoitWolf()),
]
QDA = [
    QuadraticDiscriminantAnalysis(),
    QuadraticDiscriminantAnalysis(reg_param=0.2, store_covariance=True),
    QuadraticDiscriminantAnalysis(solver="eigen", shrinkage="auto"),
]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("source", [*LDA, *QDA], ids=repr)
def test_answers(same_answers, source, labels):
    source.fit(X, LABELS[labels])
    module = _same(same_answers, source, FRESH)
    assert module.classes_.tolist() == source.classes_.tolist()
    _same(same_answers, source, FRESH[:1])
    _same(same_answers, source, FRESH * 1e3, trained=False)  # probabilities of zero and one


def _same(same_answers, source, rows, **options):
    """The fixture does not compare what raises: lsqr offers ``transform``, but has none."""
    if isinstance(source, LinearDiscriminantAnalysis) and source.solver != "lsqr":
        np.testing.assert_allclose(translate(source).transform(rows), source.transform(rows), rtol=1e-9, atol=1e-9)
    return same_answers(source, rows, **options)


@pytest.mark.parametrize("source", [s for s in LDA if s.solver != "lsqr"], ids=repr)
def test_a_projection_feeds_a_classifier(same_answers, source):
    module = same_answers(make_pipeline(source, LogisticRegression()).fit(X, LABELS["three"]), FRESH)
    assert module.frontend.is_trivial


def test_there_is_no_transform_by_least_squares():
    module = translate(LinearDiscriminantAnalysis(solver="lsqr").fit(X, LABELS["three"]))
    assert not hasattr(module, "transform")


@pytest.mark.parametrize("source", [LDA[0], QDA[0]], ids=repr)
def test_priors_and_one_feature(same_answers, source):
    source.set_params(priors=[0.1, 0.2, 0.7])
    same_answers(source.fit(X[:, :1], LABELS["three"]), FRESH[:, :1])
    source.set_params(priors=None)


def test_collinear_columns(same_answers):
    rows = np.hstack([X, X[:, :1] * 2])
    source = LinearDiscriminantAnalysis().fit(rows, LABELS["five"])
    fresh = np.hstack([FRESH, FRESH[:, :1] * 2])
    _same(same_answers, source, fresh)
    same_answers(QuadraticDiscriminantAnalysis(reg_param=0.1).fit(rows, LABELS["two"]), fresh)


def test_a_class_of_lower_rank(same_answers):
    """Earlier versions of scikit-learn fit a class of fewer rows than columns, with a warning; it has fewer axes."""
    source = QuadraticDiscriminantAnalysis(reg_param=0.5).fit(X, LABELS["three"])
    source.rotations_[0], source.scalings_[0] = source.rotations_[0][:, :3], source.scalings_[0][:3]
    same_answers(source, FRESH)


def test_a_single_class_is_refused():
    with pytest.raises(InvalidInputError, match="LinearDiscriminantAnalysis"):
        translate(LinearDiscriminantAnalysis().fit(X, ["only"] * 120))
