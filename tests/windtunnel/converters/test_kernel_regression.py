"""Kernel ridge and Gaussian processes answer as their sources do."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as gp
from sklearn.kernel_ridge import KernelRidge

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(23)
X, FRESH = RNG.normal(size=(50, 3)), RNG.normal(size=(25, 3)) * 1.5
Y = X[:, 0] ** 2 + X[:, 1] + 5
TABLE = np.stack([Y, X[:, 2] * 3], axis=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": "rbf", "gamma": 0.3},
        {"kernel": "laplacian"},
        {"kernel": "poly", "degree": 2, "coef0": 0.5, "alpha": 0.1},
        {"kernel": "polynomial", "gamma": 0.2},
        {"kernel": "sigmoid", "gamma": 0.05},
        {"kernel": "cosine"},
    ],
    ids=str,
)
def test_kernel_ridge(same_answers, options):
    source = KernelRidge(**options)
    for target in (Y, TABLE, TABLE[:, :1]):
        same_answers(source.fit(X, target), FRESH)
        same_answers(source, FRESH[:1])


def test_kernel_ridge_of_sparse_rows(same_answers):
    rows = scipy.sparse.random(50, 6, 0.5, random_state=0, format="csr")
    same_answers(KernelRidge(kernel="rbf").fit(rows, Y), rows)


COVARIANCES = [
    None,
    gp.RBF(1.3),
    gp.RBF([1.0, 2.0, 0.5]) * gp.ConstantKernel(3.0) + gp.WhiteKernel(0.1),
    *(gp.Matern(1.5, nu=nu) + gp.WhiteKernel(0.1) for nu in (0.5, 1.5, 2.5, np.inf)),
    gp.Matern([1.0, 2.0, 3.0], nu=1.5),
    gp.RationalQuadratic(1.2, alpha=0.7) + 0.1,
    gp.ExpSineSquared(1.1, 2.5) + gp.WhiteKernel(9.0),
    gp.DotProduct(0.8) ** 2 + gp.WhiteKernel(0.5),
]


@pytest.mark.parametrize("covariance", COVARIANCES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_gaussian_processes(same_answers, covariance, normalize):
    source = GaussianProcessRegressor(covariance, alpha=1e-3, normalize_y=normalize, optimizer=None)
    for target in (Y, TABLE):
        same_answers(source.fit(X, target), FRESH)
        same_answers(source, FRESH[:1])
        same_answers(source, X)


@pytest.mark.parametrize("covariance", COVARIANCES[1:], ids=str)
@pytest.mark.parametrize("strategy", ["one_vs_rest", "one_vs_one"])
def test_classification_by_processes(same_answers, covariance, strategy):
    for labels in (np.where(Y > 6, "yes", "no"), np.digitize(Y, [5.5, 6.5])):
        source = GaussianProcessClassifier(covariance, multi_class=strategy, optimizer=None).fit(X, labels)
        module = translate(source)
        assert (module.predict(FRESH) == source.predict(FRESH)).all()
        if strategy == "one_vs_rest" or len(source.classes_) == 2:
            same_answers(source, FRESH)


def test_a_tuned_process(same_answers):
    source = GaussianProcessRegressor(gp.RBF() + gp.WhiteKernel(), random_state=0).fit(X, Y)
    same_answers(source, FRESH)


class Own(gp.RBF):
    """A subclass may compute something else."""


@pytest.mark.parametrize("covariance", [gp.Matern(nu=0.8), gp.PairwiseKernel(metric="rbf"), gp.RBF() + Own()], ids=str)
def test_unknown_input_is_refused(covariance):
    with pytest.raises(InvalidInputError, match="GaussianProcessRegressor"):
        translate(GaussianProcessRegressor(covariance, alpha=0.1, optimizer=None).fit(X, Y))
    with pytest.raises(InvalidInputError, match="KernelRidge declines kernel='chi2'; fit it with one of cosine"):
        translate(KernelRidge(kernel="chi2", gamma=1.0).fit(abs(X), Y))
