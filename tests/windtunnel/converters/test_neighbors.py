"""Neighbours vote and average as in their sources, whatever the search; centroids too. Ties are in ``test_ties.py``."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.modules.kernel import neighbors
from mlsys_windtunnel.modules.kernel.neighbors import nearest
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, NearestCentroid

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(17)
X, FRESH = RNG.normal(size=(150, 4)), RNG.normal(size=(60, 4)) * 1.5
Y = X[:, 0] ** 2 + X[:, 1]
LABELS = {
    "two": np.where(Y > 0.5, "yes", "no"),
    "three": np.array(["low", "middle", "high"])[np.digitize(Y, [0, 1.2])],
    "four": np.digitize(Y, [-0.5, 0.3, 1.5]) * 5,
    "one": np.array(["only"] * 150),
}
OPTIONS = [
    {},
    {"n_neighbors": 1},
    {"weights": "distance"},
    {"algorithm": "brute", "n_neighbors": 7},
    {"algorithm": "brute", "weights": "distance"},
    {"algorithm": "ball_tree", "metric": "manhattan", "weights": "distance"},
    {"metric": "chebyshev", "weights": "distance"},
    {"metric": "l1"},
    {"p": 3, "weights": "distance"},
    {"p": 1.5, "n_neighbors": 4},
    {"p": np.inf},
    {"p": 2, "metric_params": {"w": [1.0, 2.0, 0.5, 3.0]}, "weights": "distance"},
]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_votes(same_answers, options, labels):
    source = KNeighborsClassifier(**options).fit(X, LABELS[labels])
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1])
    same_answers(source, X[:20])  # distances of zero


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_averages(same_answers, options):
    source = KNeighborsRegressor(**options)
    for target in (Y, np.stack([Y, X[:, 2]], axis=1), Y[:, None], LABELS["four"]):
        same_answers(source.fit(X, target), FRESH)
        same_answers(source, X[:20])


def test_several_samples_at_distance_zero(same_answers):
    rows = np.vstack([X, X[:3], X[:3] + 1e-12])
    target = np.append(Y, [10.0, 20, 30, 40, 50, 60])
    same_answers(KNeighborsRegressor(3, weights="distance").fit(rows, target), X[:3])


def test_as_many_neighbours_as_samples(same_answers):
    same_answers(KNeighborsRegressor(4, weights="distance").fit(X[:4], Y[:4]), FRESH)


def test_search_goes_over_blocks(same_answers, monkeypatch):
    monkeypatch.setattr(neighbors, "SAMPLES_PER_BLOCK", 32)
    same_answers(KNeighborsClassifier(5).fit(X, LABELS["three"]), FRESH)
    same_answers(KNeighborsRegressor(40, weights="distance").fit(X, Y), FRESH)


@settings(max_examples=30)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 8), st.integers(0, 99))
def test_nearest_is_a_sort(num_samples, block, k, seed):
    rng = np.random.default_rng(seed)
    samples, rows = torch.from_numpy(rng.normal(size=(num_samples, 2))), torch.from_numpy(rng.normal(size=(3, 2)))
    k = min(k, num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbors, "SAMPLES_PER_BLOCK", block)
        _, indices = nearest(rows, samples, k)
    assert indices.tolist() == torch.cdist(rows, samples).argsort(dim=1)[:, :k].tolist()


def test_gradients_are_numbers_where_a_row_is_a_sample():
    module = translate(KNeighborsRegressor(3, weights="distance").fit(X, Y))
    for rows in (X[:5], FRESH):
        module.zero_grad()
        module(torch.from_numpy(rows)).square().sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())
    samples = dict(module.named_parameters())["network.operators.0.body.samples"]
    assert samples.grad.abs().sum() > 0


def test_a_fit_on_sparse_rows(same_answers):
    rows = scipy.sparse.random(80, 6, 0.6, random_state=0, format="csr")
    same_answers(KNeighborsClassifier().fit(rows, LABELS["two"][:80]), rows)


def _own(distances):
    return np.exp(-distances)


def _apart(first, second):
    return np.abs(first - second).sum()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": _own}, "weights=the function _own; fit it with 'uniform' or 'distance'"),
        ({"metric": _apart}, "metric=the function _apart; fit it with one of braycurtis"),
        (
            {"metric": "cosine", "metric_params": {"w": np.ones(4)}, "algorithm": "brute"},
            "metric='cosine' with metric_par",
        ),
        ({"metric": "precomputed"}, "metric='precomputed'; fit it with one of"),
    ],
)
def test_unknown_options_are_refused_by_name(options, reason):
    for source in (KNeighborsClassifier(**options), KNeighborsRegressor(**options)):
        x = np.abs(X[:30] @ X[:30].T) if options.get("metric") == "precomputed" else X
        with pytest.raises(InvalidInputError, match=f"{type(source).__name__} declines {reason}"):
            translate(source.fit(x[:30], LABELS["four"][:30]))


POINTS = {
    "haversine": (X[:, :2] * 0.4, FRESH[:, :2] * 0.4),
    "hamming": (np.round(X), np.round(FRESH)),
    "nan_euclidean": tuple(np.where(RNG.random(rows.shape) < 0.2, np.nan, rows) for rows in (X, FRESH)),
    **dict.fromkeys(
        ("jaccard", "dice", "rogerstanimoto", "russellrao", "sokalmichener", "sokalsneath", "yule"),
        (X > 0.2, FRESH > 0.4),
    ),
}


@pytest.mark.parametrize("weights", ["uniform", "distance"])
@pytest.mark.parametrize(
    "metric",
    [
        *("cosine", "correlation", "canberra", "braycurtis", "sqeuclidean", "hamming", "nan_euclidean", "haversine"),
        *(
            "jaccard",
            "dice",
            "rogerstanimoto",
            "russellrao",
            "sokalmichener",
            "sokalsneath",
            "yule",
            "seuclidean",
            "mahalanobis",
        ),
    ],
)
def test_other_metrics(same_answers, metric, weights):
    rows, fresh = POINTS.get(metric, (X, FRESH))
    inverse = np.linalg.inv(np.cov(X.T))
    params = {"seuclidean": {"V": X.var(axis=0)}, "mahalanobis": {"VI": inverse}}.get(metric)
    options = {"metric": metric, "metric_params": params, "weights": weights}
    same_answers(KNeighborsClassifier(**options).fit(rows, LABELS["three"]), fresh)
    same_answers(KNeighborsRegressor(7, **options).fit(rows, Y), fresh)


def test_another_metric_is_saved_and_exported(tmp_path):
    source = KNeighborsClassifier(metric="cosine", weights="distance").fit(X, LABELS["three"])
    module = translate(source)
    np.testing.assert_allclose(
        load(save(module, tmp_path)).predict_proba(FRESH), source.predict_proba(FRESH), atol=1e-9
    )
    exported = load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict_proba"]))
    np.testing.assert_allclose(exported.predict_proba(FRESH), source.predict_proba(FRESH), atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_votes_on_several_outputs(options):
    source = KNeighborsClassifier(**options).fit(X, np.stack([LABELS["two"], LABELS["three"]], axis=1))
    module = translate(source)
    assert (module.predict(FRESH) == source.predict(FRESH)).all()
    for got, expected in zip(module.predict_proba(FRESH), source.predict_proba(FRESH), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-9)
    assert (module(torch.from_numpy(FRESH)).detach().numpy() > 0).any()
    assert not hasattr(module, "predict_log_proba")


@pytest.mark.parametrize("labels", ["two", "three", "four", "even"])
@pytest.mark.parametrize(
    "source",
    [
        NearestCentroid(),
        NearestCentroid(shrink_threshold=0.3),
        NearestCentroid(priors="empirical"),
        NearestCentroid(metric="manhattan"),
        NearestCentroid(metric="manhattan", priors="empirical", shrink_threshold=0.1),
    ],
    ids=repr,
)
def test_centroids(same_answers, source, labels):
    target = np.arange(150) % 3 if labels == "even" else LABELS[labels]
    rows = X * [1.0, 10.0, 0.1, 1.0]
    source.fit(rows, target)
    trained = source.metric == "euclidean"
    same_answers(source, FRESH * [1.0, 10.0, 0.1, 1.0], trained=trained)
    same_answers(source, FRESH[:1], trained=trained)
    same_answers(source, FRESH * 1e3, trained=False)


def test_centroids_of_a_constant_column(same_answers):
    rows = np.hstack([X, np.ones((150, 1))])
    same_answers(NearestCentroid().fit(rows, LABELS["three"]), np.hstack([FRESH, np.zeros((60, 1))]))
