"""Decompositions, random projections, kernel approximations and partial least squares.

Those whose ``transform`` is itself an optimisation (NMF, dictionary learning, latent Dirichlet allocation) have no
converter and stay fallbacks.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.host.raw_table import raw
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.kernel.decompose import (
    FactorModel,
    KernelProjection,
    LatentRegressor,
    Projection,
    RandomFourier,
)
from mlsys_windtunnel.modules.kernel.kernels import Kernel, KernelKind
from mlsys_windtunnel.modules.linear.linear import Affine

CONVERTERS = Converters()

KERNELS = {"linear", "poly", "rbf", "sigmoid", "cosine", "laplacian"}
LARGEST = 1e6  # standardised coefficient, beyond which rounding shows in the answers


def make_kernel(anchors: Any, kind: object, **parameters: Any) -> Kernel | None:
    """Make a kernel of scikit-learn's name; None for functions, "precomputed" and the chi-squared ones."""
    kind = "poly" if kind == "polynomial" else kind
    if not isinstance(kind, str) or kind not in KERNELS:
        return None
    return Kernel(raw(anchors), cast("KernelKind", kind), **parameters)


def declined_kernel(kernel: object) -> str:
    """Return the words for a kernel that :func:`make_kernel` does not know."""
    name = repr(kernel) if isinstance(kernel, str) else f"the function {getattr(kernel, '__name__', kernel)}"
    return f"kernel={name}; fit it with one of {', '.join(sorted(KERNELS))}"


@CONVERTERS.of("sklearn.decomposition", "IncrementalPCA")
def incremental_pca(estimator: Any) -> OperatorModule:
    """Convert a projection on components, whitened or not."""
    return Projection(estimator.mean_, _principal_weight(estimator))


@CONVERTERS.of("sklearn.decomposition", "PCA")
def pca(estimator: Any) -> OperatorModule:
    """Convert with the density of probabilistic PCA, unless its covariance has no inverse (the source raises there)."""
    try:
        precision = np.asarray(estimator.get_precision())
    except np.linalg.LinAlgError:
        return incremental_pca(estimator)
    return FactorModel(estimator.mean_, _principal_weight(estimator), precision)


@CONVERTERS.of("sklearn.decomposition", "FactorAnalysis")
def factor_analysis(estimator: Any) -> OperatorModule:
    """Convert to the posterior mean of the factors (Bishop, PRML, equation 12.66)."""
    scaled = estimator.components_ / estimator.noise_variance_
    posterior = np.linalg.inv(np.eye(len(scaled)) + scaled @ estimator.components_.T)
    return FactorModel(estimator.mean_, posterior.T @ scaled, estimator.get_precision())


@CONVERTERS.of("sklearn.decomposition", "TruncatedSVD")
@CONVERTERS.of("sklearn.random_projection", "GaussianRandomProjection", "SparseRandomProjection")
def truncated_svd(estimator: Any) -> OperatorModule:
    """Convert components without centring; the random projections too."""
    components = np.asarray(raw(estimator.components_), np.float64)
    return Projection(np.zeros(components.shape[1]), components)


@CONVERTERS.of("sklearn.decomposition", "FastICA")
def fast_ica(estimator: Any) -> OperatorModule:
    """Convert the unmixing matrix; centred unless whitening is off."""
    if not estimator.whiten:
        return truncated_svd(estimator)
    return Projection(estimator.mean_, estimator.components_)


@CONVERTERS.of("sklearn.decomposition", "MiniBatchSparsePCA", "SparsePCA")
def sparse_pca(estimator: Any) -> OperatorModule:
    """Convert to a linear map: the transform is a ridge regression on the components."""
    components = estimator.components_
    gram = components @ components.T + estimator.ridge_alpha * np.eye(len(components))
    return Projection(estimator.mean_, np.linalg.solve(gram, components))


@CONVERTERS.of("sklearn.decomposition", "KernelPCA")
def kernel_pca(estimator: Any) -> OperatorModule | Unsupported:
    """Convert kernels by name, and a precomputed one to an affine map of its values; functions decline."""
    roots = np.sqrt(np.where(estimator.eigenvalues_ == 0, np.inf, estimator.eigenvalues_))
    directions, centerer = estimator.eigenvectors_ / roots, estimator._centerer
    if estimator.kernel == "precomputed":  # centred: less each row's mean and each column's, plus the mean of all
        shift = (centerer.K_fit_all_ - centerer.K_fit_rows_) @ directions
        return Affine((directions - directions.mean(axis=0)).T, shift)
    kernel = make_kernel(
        estimator.X_fit_, estimator.kernel, gamma=estimator.gamma_, degree=estimator.degree, coef0=estimator.coef0
    )
    if kernel is None:
        return Unsupported(declined_kernel(estimator.kernel))
    return KernelProjection(
        kernel,
        directions,
        column_means=centerer.K_fit_rows_,
        overall_mean=float(centerer.K_fit_all_),
    )


@CONVERTERS.of("sklearn.kernel_approximation", "Nystroem")
def nystroem(estimator: Any) -> OperatorModule | Unsupported:
    """Convert kernels by name; functions and precomputed kernels decline."""
    given = {name: getattr(estimator, name) for name in ("gamma", "coef0", "degree")}
    parameters = dict(estimator.kernel_params or {}) | {
        name: value for name, value in given.items() if value is not None
    }
    kernel = make_kernel(estimator.components_, estimator.kernel, **parameters)
    if kernel is None:
        return Unsupported(declined_kernel(estimator.kernel))
    return KernelProjection(kernel, estimator.normalization_.T)


@CONVERTERS.of("sklearn.kernel_approximation", "RBFSampler")
def rbf_sampler(estimator: Any) -> OperatorModule:
    """Convert random Fourier features of the RBF kernel."""
    return RandomFourier(estimator.random_weights_, estimator.random_offset_)


def _above_minus_skewedness(estimator: Any) -> tuple[float | None, float | None]:
    return float(np.nextafter(-estimator.skewedness, np.inf)), None


@CONVERTERS.of("sklearn.kernel_approximation", "SkewedChi2Sampler", bounds=_above_minus_skewedness)
def skewed_chi2_sampler(estimator: Any) -> OperatorModule:
    """Convert random Fourier features of the skewed chi-squared kernel."""
    return RandomFourier(estimator.random_weights_, estimator.random_offset_, skewedness=float(estimator.skewedness))


def _principal_weight(estimator: Any) -> npt.NDArray[np.float64]:
    components = np.asarray(estimator.components_, np.float64)
    if not estimator.whiten:
        return components
    scale = np.sqrt(estimator.explained_variance_)
    whitened: npt.NDArray[np.float64] = components / np.maximum(scale, np.finfo(scale.dtype).eps)[:, None]
    return whitened


@CONVERTERS.of("sklearn.cross_decomposition", "CCA", "PLSCanonical", "PLSRegression")
def latent_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert predictions and the scores of the features; those of targets (``transform(X, y)``) are not offered."""
    rotations = np.asarray(estimator.x_rotations_).T
    spread = np.abs(np.asarray(estimator.coef_) * estimator._x_std).max() / np.max(estimator._y_std)
    if spread > LARGEST:
        return Unsupported(
            f"n_components={estimator.n_components}, more than the rank of the features: what is beyond it is "
            "rounding; fit fewer"
        )
    return LatentRegressor(
        estimator._x_mean,
        estimator._x_std,
        estimator.coef_,
        estimator.intercept_,
        rotations,
        is_flat=bool(estimator._predict_1d),
    )


@CONVERTERS.of("sklearn.cross_decomposition", "PLSSVD")
def latent_projection(estimator: Any) -> OperatorModule:
    """Convert the scores of the features."""
    return Projection(estimator._x_mean, np.asarray(estimator.x_weights_).T / estimator._x_std)
