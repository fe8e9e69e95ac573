"""Clusterers that can label new rows, and Gaussian mixtures.

Those that only label the rows they were fitted on (agglomerative, spectral, DBSCAN) end no pipeline that predicts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.host.raw_table import raw
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.kernel.cluster import CenterTree, Mixture, NearestCenter
from mlsys_windtunnel.modules.linear.discriminant import DiagonalGaussians, FullGaussians

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.cluster", "KMeans", "MiniBatchKMeans")
def k_means(estimator: Any) -> OperatorModule:
    """Convert to labels by the nearest centre; it transforms to distances."""
    return NearestCenter(estimator.cluster_centers_)


@CONVERTERS.of("sklearn.cluster", "AffinityPropagation", "MeanShift")
def nearest_center(estimator: Any) -> OperatorModule | Unsupported:
    """Convert a clusterer that only labels; those without centres decline (precomputed affinities, no convergence)."""
    centers = getattr(estimator, "cluster_centers_", None)
    if centers is None or len(centers) == 0:
        return Unsupported(
            "a fit without cluster_centers_ (affinity='precomputed', or no convergence): raise max_iter or damping, "
            "and fit on rows"
        )
    return NearestCenter(raw(centers), answers=("predict",))


@CONVERTERS.of("sklearn.cluster", "Birch")
def birch(estimator: Any) -> OperatorModule:
    """Convert to labels by the nearest subcluster, several of which may be one cluster."""
    return NearestCenter(estimator.subcluster_centers_, labels=estimator.subcluster_labels_)


@CONVERTERS.of("sklearn.cluster", "BisectingKMeans")
def bisecting_k_means(estimator: Any) -> OperatorModule:
    """Convert a tree of bisections, whose walk may end at another leaf than the one with the nearest centre."""
    mean = getattr(estimator, "_X_mean", 0.0)
    num_leaves = len(estimator.cluster_centers_)
    pairs, paths = [], []

    def walk(node: Any) -> list[int]:
        """Add the bisections below a node; return the labels of its leaves."""
        if node.left is None:
            return [int(node.label)]
        left, right = walk(node.left), walk(node.right)
        path = np.zeros(num_leaves)
        path[left], path[right] = 1.0, -1.0
        pairs.append(np.stack([node.left.center, node.right.center]) + mean)
        paths.append(path)
        return left + right

    walk(estimator._bisecting_tree)
    if not pairs:  # one cluster: no bisection
        return NearestCenter(estimator.cluster_centers_)
    return CenterTree(estimator.cluster_centers_, pairs=np.stack(pairs), paths=np.stack(paths, axis=1))


@CONVERTERS.of("sklearn.mixture", "GaussianMixture")
def gaussian_mixture(estimator: Any) -> OperatorModule:
    """Convert a mixture fitted by expectation maximisation."""
    return _mixture(estimator, np.log(estimator.weights_))


@CONVERTERS.of("sklearn.mixture", "BayesianGaussianMixture")
def bayesian_gaussian_mixture(estimator: Any) -> OperatorModule:
    """Convert a mixture fitted by variational inference.

    It has expected log-weights and log-determinants (Bishop, PRML, 10.64-66).
    """
    from scipy.special import digamma  # type: ignore[import-untyped]

    features = estimator.n_features_in_
    freedom = np.asarray(estimator.degrees_of_freedom_)
    concentration = estimator.weight_concentration_
    if estimator.weight_concentration_prior_type == "dirichlet_process":
        taken, left = concentration
        total = digamma(taken + left)
        log_weights = digamma(taken) - total + np.hstack((0, np.cumsum(digamma(left) - total)[:-1]))
    else:
        log_weights = digamma(concentration) - digamma(np.sum(concentration))
    expected = digamma(0.5 * (freedom - np.arange(features)[:, None])).sum(axis=0) + features * np.log(2.0)
    correction = 0.5 * (expected - features / estimator.mean_precision_ - features * np.log(freedom))
    return _mixture(estimator, log_weights + correction)


def _mixture(estimator: Any, bias: Any) -> OperatorModule:
    """Make a mixture of precisions' Cholesky factors, whose diagonal is split off: it alone makes the volume."""
    factors = np.asarray(estimator.precisions_cholesky_, np.float64)
    if estimator.covariance_type == "diag":
        return Mixture(DiagonalGaussians(estimator.means_, factors, bias))
    if estimator.covariance_type == "spherical":
        return Mixture(DiagonalGaussians(estimator.means_, factors[:, None], bias))
    factors = factors[None] if estimator.covariance_type == "tied" else factors
    diagonal = np.diagonal(factors, axis1=1, axis2=2)
    return Mixture(FullGaussians(estimator.means_, factors / diagonal[:, None, :], np.log(diagonal), bias))
