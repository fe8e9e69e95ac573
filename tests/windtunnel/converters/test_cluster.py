"""Clusterers label and measure new rows as their sources do."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn import cluster
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(13)
CENTERS = RNG.normal(size=(6, 4)) * 3
X = CENTERS[RNG.integers(0, 6, 150)] + RNG.normal(size=(150, 4))
FRESH = RNG.normal(size=(200, 4)) * 4
LABELS = np.where(X[:, 0] > 0, "yes", "no")


def _same(same_answers, source, rows, **options):
    """The fixture lets a predictor be without ``transform``; these have it."""
    expected = source.transform(rows)
    np.testing.assert_allclose(translate(source).transform(rows), expected, rtol=1e-6, atol=1e-6)
    return same_answers(source, rows, **options)


CLUSTERERS = [
    cluster.KMeans(5, random_state=0, n_init=2),
    cluster.KMeans(1, random_state=0, n_init=1),
    cluster.MiniBatchKMeans(4, random_state=0, n_init=2),
    cluster.BisectingKMeans(1, random_state=0),
    cluster.BisectingKMeans(2, random_state=0),
    cluster.BisectingKMeans(9, random_state=0),
    cluster.BisectingKMeans(7, random_state=1, bisecting_strategy="largest_cluster"),
    cluster.Birch(n_clusters=3),
    cluster.Birch(n_clusters=None, threshold=1.5),
]


@pytest.mark.parametrize("source", CLUSTERERS, ids=repr)
def test_distances_and_labels(same_answers, source):
    source.fit(X)
    _same(same_answers, source, FRESH)
    _same(same_answers, source, FRESH[:1])
    _same(same_answers, source, X)
    piped = make_pipeline(StandardScaler(), source, LogisticRegression()).fit(X, LABELS)
    assert same_answers(piped, FRESH).frontend.is_trivial


def test_the_tree_of_bisections_is_not_the_nearest_centre():
    source = cluster.BisectingKMeans(9, random_state=0).fit(X)
    nearest = source.transform(FRESH).argmin(axis=1)
    assert (nearest != source.predict(FRESH)).any(), "so walking the tree is tested"


def test_rows_at_a_centre(same_answers):
    source = cluster.KMeans(5, random_state=0, n_init=1).fit(X)
    module = _same(same_answers, source, source.cluster_centers_)
    assert module.predict(source.cluster_centers_).tolist() == [0, 1, 2, 3, 4]


def test_centres_equally_near(same_answers):
    source = cluster.KMeans(2, random_state=0, n_init=1).fit([[0.0], [0.0], [2.0], [2.0]])
    _same(same_answers, source, np.array([[1.0], [1.0 - 1e-9], [1.0 + 1e-9]]))
    tree = cluster.BisectingKMeans(2, random_state=0).fit([[0.0], [0.0], [2.0], [2.0]])
    _same(same_answers, tree, np.array([[1.0], [1.0 - 1e-9], [1.0 + 1e-9]]))


@pytest.mark.parametrize(
    "source", [cluster.MeanShift(bandwidth=3), cluster.AffinityPropagation(random_state=0, damping=0.8)], ids=repr
)
def test_labels_alone(same_answers, source):
    source.fit(X)
    assert len(source.cluster_centers_) > 1
    module = same_answers(source, FRESH, trained=False)
    same_answers(source, FRESH[:1], trained=False)
    assert not hasattr(module, "transform")


def test_without_centres_it_stays_a_fallback():
    source = cluster.AffinityPropagation(max_iter=1, random_state=0).fit(X)
    assert len(source.cluster_centers_) == 0
    with pytest.raises(InvalidInputError, match="AffinityPropagation"):
        translate(source)


def test_a_fit_on_sparse_rows(same_answers):
    rows = scipy.sparse.random(80, 5, 0.5, random_state=0, format="csr")
    for source in (cluster.KMeans(3, random_state=0, n_init=1), cluster.BisectingKMeans(4, random_state=0)):
        _same(same_answers, source.fit(rows), rows)


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize(
    "source",
    [
        GaussianMixture(4, random_state=0),
        BayesianGaussianMixture(n_components=4, random_state=0),
        BayesianGaussianMixture(
            n_components=3, random_state=0, weight_concentration_prior_type="dirichlet_distribution"
        ),
    ],
    ids=repr,
)
def test_mixtures(same_answers, source, covariance_type):
    source.set_params(covariance_type=covariance_type).fit(X)
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1], trained=False)  # may be one component's beyond doubt
    same_answers(source, FRESH * 100, trained=False)
    same_answers(source.fit(X[:, :1]), FRESH[:, :1])


def test_a_mixture_of_one(same_answers):
    same_answers(GaussianMixture(1, random_state=0).fit(X), FRESH, trained=False)
