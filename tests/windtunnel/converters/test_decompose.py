"""Decompositions and kernel maps project as their sources do; what optimises when it transforms stays a fallback."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.kernel.kernels import Kernel, distances, squared_distances
from sklearn import decomposition, kernel_approximation, random_projection
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.pipeline import make_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(11)
MIX = RNG.normal(size=(5, 5))
X, FRESH = RNG.normal(3, 1, size=(90, 5)) @ MIX, RNG.normal(3, 2, size=(31, 5)) @ MIX
LABELS = np.array(["a", "b", "c"])[np.digitize(X[:, 0], np.quantile(X[:, 0], [0.3, 0.6]))]


LINEAR = [
    decomposition.PCA(0.8, svd_solver="full"),
    decomposition.PCA(3, whiten=True),
    decomposition.IncrementalPCA(3, whiten=True, batch_size=20),
    decomposition.TruncatedSVD(2, algorithm="arpack", random_state=0),
    decomposition.FastICA(3, random_state=0, whiten="unit-variance"),
    decomposition.FastICA(random_state=0, whiten="arbitrary-variance"),
    decomposition.FastICA(random_state=0, whiten=False, max_iter=3),
    decomposition.FactorAnalysis(2),
    decomposition.FactorAnalysis(rotation="varimax", n_components=2),
    random_projection.GaussianRandomProjection(3, random_state=0),
    random_projection.SparseRandomProjection(3, random_state=0, density=0.5, dense_output=True),
]


@pytest.mark.parametrize("source", LINEAR, ids=repr)
def test_linear_projections(same_answers, source):
    source.fit(X)
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1])
    same_answers(make_pipeline(source, LogisticRegression()).fit(X, LABELS), FRESH)


@pytest.mark.parametrize(
    "source",
    [
        decomposition.SparsePCA(2, random_state=0, max_iter=20),
        decomposition.MiniBatchSparsePCA(2, random_state=0, max_iter=20, ridge_alpha=0.5),
    ],
    ids=repr,
)
def test_sparse_components(same_answers, source):
    source.fit(X)
    same_answers(source, FRESH)
    flat = source.transform(FRESH[:1])  # of a single row the source forgets that it is a table
    np.testing.assert_allclose(translate(source).transform(FRESH[:1]), flat.reshape(1, -1), atol=1e-9)


KERNEL = [
    *(decomposition.KernelPCA(3, kernel=kind) for kind in ("linear", "poly", "rbf", "cosine")),
    decomposition.KernelPCA(3, kernel="sigmoid", gamma=0.01, coef0=0.3),
    decomposition.KernelPCA(2, kernel="poly", degree=2, gamma=0.05, coef0=2),
    kernel_approximation.Nystroem(n_components=9, random_state=0, kernel="laplacian", gamma=0.05),
    decomposition.KernelPCA(kernel="rbf", gamma=0.02, remove_zero_eig=True),
    kernel_approximation.Nystroem(n_components=20, random_state=0),
    kernel_approximation.Nystroem(n_components=20, random_state=0, gamma=0.05),
    kernel_approximation.Nystroem(n_components=9, random_state=0, kernel="polynomial", degree=2, coef0=0.5, gamma=0.1),
    kernel_approximation.Nystroem(n_components=9, random_state=0, kernel="sigmoid", kernel_params={"gamma": 0.01}),
    kernel_approximation.Nystroem(n_components=5, random_state=0, kernel="cosine"),
    kernel_approximation.RBFSampler(n_components=12, random_state=0, gamma=0.3),
    kernel_approximation.RBFSampler(n_components=12, random_state=0, gamma="scale"),
]


@pytest.mark.parametrize("source", KERNEL, ids=repr)
def test_kernel_projections(same_answers, source):
    source.fit(X)
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1])
    same_answers(source, X)
    same_answers(make_pipeline(source, LogisticRegression()).fit(X, LABELS), FRESH)


def test_skewed_chi2(same_answers):
    source = kernel_approximation.SkewedChi2Sampler(n_components=8, random_state=0, skewedness=0.5).fit(abs(X))
    same_answers(source, abs(FRESH))
    with pytest.raises(InvalidInputError, match="takes no numbers below"):
        translate(source).transform(np.full((1, 5), -1.0))


@pytest.mark.parametrize("kind", ["linear", "poly", "rbf", "sigmoid", "cosine", "laplacian"])
def test_kernels_are_scikit_learns(kind):
    rows = np.vstack([FRESH, np.zeros((1, 5)), X[:3]]) / 5
    expected = pairwise_kernels(rows, X, metric=kind)
    np.testing.assert_allclose(Kernel(X, kind)(torch.from_numpy(rows)).detach(), expected, rtol=1e-9, atol=1e-12)


def test_a_common_offset_costs_no_digits():
    rows, anchors = torch.from_numpy(FRESH), torch.from_numpy(X)
    near = squared_distances(rows, anchors)
    torch.testing.assert_close(squared_distances(rows + 2.0**20, anchors + 2.0**20), near, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(distances(rows, anchors) ** 2, near)


def test_gradients_at_an_anchor_are_numbers():
    for kind in ("rbf", "laplacian", "cosine"):
        x = torch.from_numpy(np.vstack([X[:2], np.zeros((1, 5))])).requires_grad_()
        kernel = Kernel(X, kind)
        kernel(x).sum().backward()
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(parameter.grad).all() for parameter in kernel.parameters())


def test_sparse_input(same_answers):
    rows = scipy.sparse.random(60, 6, 0.4, random_state=0, format="csr")
    for source in (
        decomposition.TruncatedSVD(2, random_state=0),
        decomposition.IncrementalPCA(2),
        decomposition.PCA(2, svd_solver="arpack", random_state=0),
        decomposition.KernelPCA(2, kernel="rbf"),
        kernel_approximation.Nystroem(n_components=8, random_state=0),
        random_projection.SparseRandomProjection(2, random_state=0),
    ):
        source.fit(rows)
        np.testing.assert_allclose(translate(source).transform(rows), _dense(source.transform(rows)), atol=1e-9)


def _dense(table):
    return table.toarray() if hasattr(table, "toarray") else table


def test_fewer_rows_than_columns(same_answers):
    wide = RNG.normal(size=(4, 9))
    same_answers(decomposition.PCA(2).fit(wide), RNG.normal(size=(7, 9)))
    source = decomposition.PCA(whiten=True).fit(wide)  # its last variance is zero, up to rounding
    rows = RNG.normal(size=(7, 9))
    np.testing.assert_allclose(translate(source).transform(rows)[:, :3], source.transform(rows)[:, :3], atol=1e-9)


def test_a_density_without_covariance_leaves_the_transform(monkeypatch):
    source = decomposition.PCA(2).fit(X)

    def singular():
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr(source, "get_precision", singular, raising=False)
    module = translate(source)
    np.testing.assert_allclose(module.transform(FRESH), source.transform(FRESH), atol=1e-12)
    assert not hasattr(module, "score_samples")


def _own_kernel(a, b):
    return float(a @ b)


@pytest.mark.parametrize(
    "source",
    [
        decomposition.NMF(2, max_iter=5),
        decomposition.KernelPCA(2, kernel=_own_kernel),
        kernel_approximation.Nystroem(kernel="chi2", n_components=5),
        kernel_approximation.Nystroem(kernel=_own_kernel, n_components=5),
    ],
)
def test_unknown_options_stay_a_fallback(same_answers, source):
    with pytest.raises(InvalidInputError, match=type(source).__name__):
        translate(source.fit(abs(X)))
    whole = make_pipeline(source, LogisticRegression()).fit(abs(X), LABELS)
    assert same_answers(whole, abs(FRESH)).frontend.fallbacks
