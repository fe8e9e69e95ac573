"""Naive Bayes answers as its sources do, also where probabilities underflow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn import naive_bayes
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(9)
X, FRESH = RNG.normal(size=(90, 5)), RNG.normal(size=(30, 5)) * 2
COUNTS, FRESH_COUNTS = RNG.poisson(3, (90, 5)).astype(float), RNG.poisson(4, (30, 5)).astype(float)
CODES, FRESH_CODES = RNG.integers(0, [2, 3, 4, 5, 1], (90, 5)), RNG.integers(0, [2, 3, 4, 5, 1], (30, 5))
LABELS = {
    "two": np.where(X[:, 0] + COUNTS[:, 0] + CODES[:, 1] > 4, "yes", "no"),
    "three": np.array(["a", "b", "c"])[np.digitize(X[:, 0] + COUNTS[:, 1] + CODES[:, 2], [3, 5])],
    "one": np.array([7] * 90),
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("source", [naive_bayes.GaussianNB(), naive_bayes.GaussianNB(var_smoothing=1e-2)], ids=repr)
def test_gaussians(same_answers, source, labels):
    source.fit(X, LABELS[labels])
    has_choice = labels != "one"
    same_answers(source, FRESH, trained=has_choice)
    same_answers(source, FRESH[:1], trained=has_choice)
    same_answers(source, FRESH * 100, trained=False)
    same_answers(source, FRESH.astype(np.float32).astype(float), trained=has_choice)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    "source",
    [
        naive_bayes.MultinomialNB(),
        naive_bayes.MultinomialNB(alpha=0.01, fit_prior=False),
        naive_bayes.ComplementNB(),
        naive_bayes.ComplementNB(norm=True, alpha=0.5),
        naive_bayes.BernoulliNB(),
        naive_bayes.BernoulliNB(binarize=3.0),
        naive_bayes.BernoulliNB(binarize=2.5, alpha=0.1, fit_prior=False),
    ],
    ids=repr,
)
def test_counts_and_bits(same_answers, source, labels):
    source.fit(COUNTS, LABELS[labels])
    has_choice = labels != "one"
    same_answers(source, FRESH_COUNTS, trained=has_choice)
    same_answers(source, FRESH_COUNTS[:1], trained=has_choice)
    same_answers(source, FRESH_COUNTS * 1000, trained=False)
    same_answers(source, scipy.sparse.csr_matrix(FRESH_COUNTS), trained=has_choice)


def test_bits_as_they_are(same_answers):
    bits = (COUNTS > 2).astype(float)
    same_answers(naive_bayes.BernoulliNB(binarize=None).fit(bits, LABELS["three"]), (FRESH_COUNTS > 2).astype(float))


def test_a_threshold_hit_exactly(same_answers):
    source = naive_bayes.BernoulliNB(binarize=0.3).fit(X, LABELS["two"])
    same_answers(source, np.array([[0.3] * 5, [np.nextafter(0.3, 1)] * 5]))


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    "source",
    [naive_bayes.CategoricalNB(), naive_bayes.CategoricalNB(alpha=0.1, fit_prior=False, min_categories=6)],
    ids=repr,
)
def test_codes(same_answers, source, labels):
    source.fit(CODES, LABELS[labels])
    has_choice = labels != "one"
    same_answers(source, FRESH_CODES, trained=has_choice)
    same_answers(source, FRESH_CODES[:1], trained=has_choice)
    same_answers(source, FRESH_CODES.clip(0, 0.9), trained=has_choice)  # cut to whole numbers


@pytest.mark.parametrize("code", [5.0, -1.0, np.nan])
def test_a_code_without_a_category_is_refused_and_nan_once_exported(code):
    source = naive_bayes.CategoricalNB().fit(CODES, LABELS["two"])
    rows = FRESH_CODES.astype(float)
    rows[3, 3] = code
    module = translate(source)
    with pytest.raises((IndexError, ValueError)):
        source.predict_proba(rows)
    with pytest.raises(InvalidInputError, match=r"row 3 has .* in feature 3, which has the categories 0 to 4"):
        module.predict_proba(rows)
    x = torch.from_numpy(rows)
    answer = torch.export.export(module, (x,)).module()(x).detach().numpy()
    assert np.isnan(answer[3]).all()
    np.testing.assert_allclose(answer[4:], source.predict_proba(rows[4:]), atol=1e-12)


def test_text_is_encoded_before_it_is_looked_up(same_answers):
    frame = pd.DataFrame({"a": RNG.choice(list("xyz"), 90), "b": RNG.choice(list("uv"), 90)})
    source = make_pipeline(OrdinalEncoder(), naive_bayes.CategoricalNB()).fit(frame, LABELS["three"])
    same_answers(source, frame[:20])


def test_certain_features_and_absent_classes(same_answers):
    rows = np.array([[0.0, 1.0], [0.0, 2.0], [3.0, 1.0]])
    labels = ["a", "a", "b"]
    same_answers(naive_bayes.MultinomialNB(alpha=1e-10).fit(rows, labels), rows + 1)
    prior = naive_bayes.GaussianNB(priors=[0.0, 1.0]).fit(X, LABELS["two"])
    same_answers(prior, FRESH, trained=False)
