"""Support vector machines of libsvm: classifiers, regressors and the one-class machine, with libsvm's kernels."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from mlsys_windtunnel.convert.linear import MARGINS, OUTLIERS, PROBABILISTIC, class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.host.raw_table import raw
from mlsys_windtunnel.modules.base import OperatorModule, OutlierDetector, Regressor
from mlsys_windtunnel.modules.kernel.kernels import Kernel
from mlsys_windtunnel.modules.kernel.svm import KernelExpansion, PairwiseExpansion, SupportVectorClassifier
from mlsys_windtunnel.modules.linear.linear import Affine

CONVERTERS = Converters()

KERNELS = ("linear", "poly", "rbf", "sigmoid", "precomputed")
_LINEAR = ("linear", "precomputed")  # affine maps of what is given: of features, or of kernel values


@CONVERTERS.of("sklearn.svm", "NuSVC", "SVC")
def support_vector_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert; decline kernels of the user's own, and ties that the source refuses to break."""
    is_one_vs_rest = estimator.decision_function_shape == "ovr"
    if not _has_own_kernel(estimator):
        return Unsupported(_declined_kernel(estimator))
    if estimator.break_ties and not is_one_vs_rest:
        return Unsupported("break_ties=True with decision_function_shape='ovo', which it refuses to answer; take 'ovr'")
    slopes, shifts = estimator._probA, estimator._probB  # empty unless fitted with probability=True
    has_probabilities = hasattr(estimator, "predict_proba") and len(slopes) > 0
    return SupportVectorClassifier(
        _pairwise(estimator),
        classes=class_labels(estimator.classes_),
        answers=PROBABILISTIC if has_probabilities else MARGINS,
        is_one_vs_rest=is_one_vs_rest,
        breaks_ties=estimator.break_ties and len(estimator.classes_) > 2,
        sigmoids=(slopes, shifts) if has_probabilities else None,
    )


@CONVERTERS.of("sklearn.svm", "NuSVR", "SVR")
def support_vector_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert epsilon and nu regression."""
    if not _has_own_kernel(estimator):
        return Unsupported(_declined_kernel(estimator))
    return Regressor(_expansion(estimator))


@CONVERTERS.of("sklearn.svm", "OneClassSVM")
def one_class_svm(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to inlier where the decision value is positive."""
    if not _has_own_kernel(estimator):
        return Unsupported(_declined_kernel(estimator))
    offset = float(np.ravel(estimator.offset_)[0])
    return OutlierDetector(_expansion(estimator), includes_zero=False, answers=OUTLIERS, offset=offset)


def _declined_kernel(estimator: Any) -> str:
    kernel = estimator.kernel
    name = repr(kernel) if isinstance(kernel, str) else f"the function {getattr(kernel, '__name__', kernel)}"
    return f"kernel={name}; fit it with one of {', '.join(KERNELS)}"


def _has_own_kernel(estimator: Any) -> bool:
    return isinstance(estimator.kernel, str) and estimator.kernel in KERNELS


def _vectors(estimator: Any) -> npt.NDArray[np.float64]:
    """Return the vectors ``[support vectors, features]`` of a linear kernel; of a precomputed one, they pick values.

    A fit on sparse input keeps vectors and coefficients sparse.
    """
    if estimator.kernel == "precomputed":
        picks: npt.NDArray[np.float64] = np.eye(estimator.shape_fit_[1])[estimator.support_]
        return picks
    return raw(estimator.support_vectors_)


def _kernel(estimator: Any) -> nn.Module:
    return Kernel(
        raw(estimator.support_vectors_),
        estimator.kernel,
        gamma=float(estimator._gamma),  # "scale" and "auto" as the fit resolved them
        coef0=estimator.coef0,
        degree=estimator.degree,
    )


def _expansion(estimator: Any) -> nn.Module:
    """Make the map of one decision value; for a linear kernel, the affine map that it is."""
    dual = raw(estimator.dual_coef_)
    if estimator.kernel in _LINEAR:
        return Affine(dual @ _vectors(estimator), estimator.intercept_)
    return KernelExpansion(_kernel(estimator), dual, estimator.intercept_)


def _pairwise(estimator: Any) -> nn.Module:
    """Return the decision values of all pairs, in libsvm's signs; for a linear kernel, as an affine map."""
    dual, intercept = raw(estimator._dual_coef_), estimator._intercept_  # the public ones have other signs for two
    rows, takes_part = _pair_layout(estimator.n_support_)
    if estimator.kernel in _LINEAR:
        weights = np.where(takes_part, np.take_along_axis(dual, rows, axis=0), 0.0)
        return Affine(weights @ _vectors(estimator), intercept)
    return PairwiseExpansion(_kernel(estimator), dual=dual, rows=rows, takes_part=takes_part, intercept=intercept)


def _pair_layout(num_support: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the row of dual coefficients, and a mask of those that take part, for pairs and support vectors.

    Support vectors come class by class.

    A support vector of class c keeps its coefficient against class d in row d - 1 if c < d, else in row d.
    """
    owner = np.repeat(np.arange(len(num_support)), num_support)
    pairs = list(combinations(range(len(num_support)), 2))
    rows = np.stack([np.where(owner == first, second - 1, first) for first, second in pairs])
    takes_part = np.stack([(owner == first) | (owner == second) for first, second in pairs])
    return rows.astype(np.int64), takes_part
