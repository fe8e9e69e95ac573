"""Compare answers: to the last bit, or by the size of their difference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlsys_serving.isolation.requests import Array, Arrays


def rounding(dtype: npt.DTypeLike) -> float:
    """Return the relative difference that counts as rounding: half of the digits of ``dtype``; 0 for integers.

    Example:
        >>> f"{rounding(np.float32):.1e}", rounding(np.int64)
        ('3.5e-04', 0.0)
    """
    kind = np.dtype(dtype)
    return float(np.sqrt(np.finfo(kind).eps)) if kind.kind in "fc" else 0.0


def difference(left: Array, right: Array) -> float:
    """Return the largest difference; NaN and infinities equal themselves, and are infinitely far from all else."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if same(left, right):
        return 0.0
    if left.dtype.kind not in "fciu":
        return float("inf")
    wide = np.complex128 if left.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        apart = np.abs(left.astype(wide) - right.astype(wide))
    alike = (left == right) | ((left != left) & (right != right))
    return float(np.where(alike, 0.0, np.where(np.isfinite(apart), apart, np.inf)).max())


def magnitude(array: Array) -> float:
    """Return the largest finite magnitude."""
    if not array.size or array.dtype.kind not in "fciu":
        return 0.0
    magnitudes = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    return float(np.where(np.isfinite(magnitudes), magnitudes, 0.0).max())


def same(left: Array, right: Array) -> bool:
    """Return whether two arrays are equal; bits are compared first, as nearly all are equal."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind == "f" and left.dtype.itemsize <= 8:
        bits = f"u{left.dtype.itemsize}"
        if np.array_equal(left.view(bits), right.view(bits)):
            return True
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def equal(left: Arrays, right: Arrays) -> bool:
    """Return whether two answers are the same, array by array."""
    return len(left) == len(right) and all(map(same, left, right))
