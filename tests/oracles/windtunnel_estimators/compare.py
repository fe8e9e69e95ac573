"""One verdict for each answer of a translation beside its source's: equal, refused, wrong or raw."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse
from mlsys_core.errors import MlsysError

from tests.oracles.tally import Tally

METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")
TOLERANCE = 1e-6  # of the largest number of a column


def answer(function: Any, x: Any) -> tuple[Any, Exception | None]:
    """Return a method's answer, or the error it raises."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return function(x), None
        except Exception as error:  # noqa: BLE001  third-party code
            return None, error


def compare(source: Any, module: Any, method: str, x: Any, where: str, tally: Tally) -> None:
    """Ask both for the same and count the verdict.

    The translation computes in float64: where the source computes in its input's own narrower dtype, what counts is its
    answer for the same numbers in float64.
    """
    got, raised = answer(getattr(module, method), x)
    if raised is not None and not isinstance(raised, MlsysError):
        tally.add("raw", where, f"{type(raised).__name__}: {raised}"[:300])
        return
    wanted, refused = answer(getattr(source, method), x)
    if raised is not None:
        reason = "" if refused is not None else f"{type(source).__name__}: {str(raised)[:100]}"
        is_plain = not (len(str(raised)) and "\n" not in str(raised))
        tally.add("raw" if is_plain else "refused", where, reason)
        return
    if refused is not None and _is_own_fault(refused):
        wanted, refused = answer(getattr(source, method), _in_float64(x))
    if refused is not None and _forgets_one_row(refused, x):
        twice, refused = answer(getattr(source, method), _repeated(x))
        wanted = None if twice is None else twice[:1]
    if refused is not None:
        tally.add("wrong", where, f"answered, where the source says {str(refused).strip().splitlines()[0][:200]!r}")
        return
    if getattr(got, "shape", ())[:1] == (1,) and getattr(wanted, "shape", None) == got.shape[1:]:
        wanted = np.asarray(wanted)[None]  # SparsePCA forgets the rows' dimension where there is one row
    difference = _difference(got, wanted)
    if difference and (wide := _in_float64(x)) is not None:
        again, refused = answer(getattr(source, method), wide)
        difference = difference if refused is not None else _difference(got, again)
    if difference and _is_rounding(source, method, x, got, wanted):
        difference = ""
    tally.add("wrong" if difference else "equal", where, difference)


def _forgets_one_row(error: Exception, x: Any) -> bool:
    """Return whether SparsePCA made one dimension of one row's answer, which the next step refuses."""
    return getattr(x, "shape", ())[:1] == (1,) and "Expected 2D array, got 1D array instead" in str(error)


def _repeated(x: Any) -> Any:
    return x.iloc[[0, 0]] if hasattr(x, "iloc") else x[[0, 0]]


def _is_rounding(source: Any, method: str, x: Any, got: Any, wanted: Any) -> bool:
    """Return whether the source differs from itself as much, for numbers nudged by their last bit: nothing is left."""
    try:
        table = np.asarray(x.toarray() if scipy.sparse.issparse(x) else x, np.float64)
        mixed = np.random.default_rng(0).choice([-np.inf, np.inf], table.shape)  # of cells all alike, sums cancel
        ends = (-np.inf, np.inf, mixed)
        near = [np.asarray(getattr(source, method)(np.nextafter(table, end)), np.float64) for end in ends]
        own = np.max([np.abs(each - wanted) for each in near], axis=0).max()
        return bool(np.abs(np.asarray(got, np.float64) - wanted).max() <= 16 * own)
    except (TypeError, ValueError, OverflowError):
        return False


def _is_own_fault(error: Exception) -> bool:
    """Return whether scikit-learn fails on its own, where it means to answer: for these numbers in float64 it does."""
    faults = (
        "Buffer dtype mismatch",  # KMeans, fitted on float64 and given float32
        "'coo_matrix' object is not subscriptable",  # IncrementalPCA
        "ufunc 'erf' not supported for the input types",  # GaussianProcessClassifier, given long doubles
        "assignment destination is read-only",  # PowerTransformer, given a frame of nullable columns
        "Dtype of A and B must be the same",  # SparseRandomProjection(dense_output=True), given sparse float32
    )
    return any(fault in str(error) for fault in faults)


def _in_float64(x: Any) -> Any:
    """The same numbers in a dense table of float64; None where they are in one already."""
    if scipy.sparse.issparse(x):
        return x.toarray().astype(np.float64)
    dtypes = list(x.dtypes) if hasattr(x, "dtypes") else [getattr(x, "dtype", np.dtype(object))]
    if all(dtype == np.float64 for dtype in dtypes):
        return None
    try:
        return x.astype(np.float64) if hasattr(x, "astype") else np.asarray(x, np.float64)
    except (TypeError, ValueError, OverflowError):
        labels = getattr(x, "columns", ())
        numbers = [name for name, dtype in zip(labels, dtypes, strict=False) if getattr(dtype, "kind", "O") in "iuf"]
        return x.astype(dict.fromkeys(numbers, np.float64)) if numbers else None


def _difference(got: Any, wanted: Any) -> str:
    """Return how two answers differ; empty if they do not."""
    if isinstance(wanted, list) and isinstance(got, list):
        if len(got) != len(wanted):
            return f"{len(got)} tables for {len(wanted)}"
        return next(filter(None, map(_difference, got, wanted)), "")
    got, wanted = (each.toarray() if scipy.sparse.issparse(each) else np.asarray(each) for each in (got, wanted))
    if got.shape != wanted.shape:
        return f"shape {got.shape} for {wanted.shape}"
    if wanted.dtype.kind not in "biuf" or got.dtype.kind not in "biuf":
        unlike = [
            (one, other) for one, other in zip(got.ravel(), wanted.ravel(), strict=True) if not _is_same(one, other)
        ]
        return f"{len(unlike)} labels, as {unlike[0][0]!r} for {unlike[0][1]!r}" if unlike else ""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True):
        return f"{got[~finite][:3]} for {wanted[~finite][:3]}"
    if not finite.any():
        return ""
    scale = np.abs(np.where(finite, wanted, 0)).max(axis=0, keepdims=True)
    with np.errstate(all="ignore"):
        error = np.abs(np.where(finite, got - wanted, 0)) / (1 + scale)
    return "" if bool(error.max() <= TOLERANCE) else f"differs by {error.max():.3g} of the largest"


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two labels or cells are equal, or missing alike."""
    if one is other or repr(one) == repr(other):
        return True
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (TypeError, ValueError):
        return False
