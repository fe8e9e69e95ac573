"""Partial least squares, robust outliers and label propagation answer as their sources do."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.covariance import EllipticEnvelope
from sklearn.cross_decomposition import CCA, PLSSVD, PLSCanonical, PLSRegression
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OutputCodeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelPropagation, LabelSpreading

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(5)
X, FRESH = RNG.normal(2, 1, size=(80, 5)), RNG.normal(2, 2, size=(30, 5))
TARGETS = np.stack([X[:, 0] - X[:, 1] + 3, X[:, 2] * 2 + RNG.normal(0, 0.3, 80)], axis=1)
LABELS = np.array(["low", "middle", "high"])[np.digitize(X[:, 0], [1.5, 2.5])]


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("kind", [CCA, PLSCanonical, PLSRegression])
def test_latent_regressors_predict_and_project(kind, scale, same_answers):
    module = same_answers(kind(2, scale=scale).fit(X, TARGETS), FRESH)
    assert hasattr(module, "transform")


def test_one_target_is_flat(same_answers):
    flat = same_answers(PLSRegression(3).fit(X, TARGETS[:, 0]), FRESH).predict(FRESH)
    assert flat.shape == (30,)


def test_latent_projection(same_answers):
    same_answers(PLSSVD(2).fit(X, TARGETS), FRESH)


def test_components_beyond_the_rank_are_refused_with_the_option():
    wide = X[:, :2] @ RNG.normal(size=(2, 5))
    with pytest.raises(InvalidInputError, match="n_components=5, more than the rank"):
        translate(PLSRegression(5, tol=0).fit(wide, TARGETS))


@pytest.mark.parametrize("options", [{}, {"contamination": 0.3, "store_precision": False}, {"assume_centered": True}])
def test_elliptic_envelope(options, same_answers):
    module = same_answers(EllipticEnvelope(random_state=0, **options).fit(X), FRESH)
    assert set(module.predict(FRESH)) == {1, -1}


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5}, {"kernel": "knn", "n_neighbors": 4}])
@pytest.mark.parametrize("kind", [LabelPropagation, LabelSpreading])
def test_label_propagation(kind, options, same_answers):
    codes = np.digitize(X[:, 0], [1.5, 2.5])
    codes[::3] = -1  # without a label
    same_answers(make_pipeline(StandardScaler(), kind(**options)).fit(X, codes), X + 0.01)


def test_propagation_by_a_function_is_refused_with_the_option():
    def near(x, y):
        return np.exp(-np.square(x[:, None] - y[None]).sum(axis=2))

    with pytest.raises(InvalidInputError, match="kernel=the function near; fit it with 'rbf' or 'knn'"):
        translate(LabelPropagation(near).fit(X, np.digitize(X[:, 0], [2.0])))


def test_a_wrapper_offers_no_method_of_what_it_wraps():
    """One-vs-one has decision values, a Gaussian process classifier that is made of it has none."""
    source = GaussianProcessClassifier(multi_class="one_vs_one", optimizer=None).fit(X, LABELS)
    module = translate(source)
    assert (module.predict(FRESH) == source.predict(FRESH)).all()
    assert not hasattr(module, "decision_function")


def test_members_that_are_all_constant_are_named():
    fits = (
        OutputCodeClassifier(LogisticRegression(), code_size=0.4, random_state=seed).fit(X, LABELS)
        for seed in range(40)
    )
    source = next(fit for fit in fits if len(np.unique(fit.code_book_)) == 1)  # one code for all classes
    with pytest.raises(InvalidInputError, match=r"members of .*OutputCodeClassifier cannot be joined"):
        translate(source)
