"""Draw requests of each kind, and compare answers to the bit or within rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = Sequence[Array]


class Kind(Enum):
    """A kind of request to draw."""

    ORDINARY = auto()
    OTHER_LENGTH = auto()  # of another length than the ordinary ones, where requests have lengths
    SMALL = auto()  # numbers a thousandth as large
    LARGE = auto()  # a thousand times as large
    VERY_LARGE = auto()  # a million times as large
    POSITIVE = auto()
    NEGATIVE = auto()
    ZERO = auto()
    HUGE = auto()  # the largest numbers of the dtype: sums overflow
    INFINITE = auto()
    NAN = auto()
    SMALL_INTEGER = auto()  # integers from 0 to 9, beside ordinary floats; so are those below
    LARGE_INTEGER = auto()  # about a thousand
    VERY_LARGE_INTEGER = auto()  # about a million
    NEGATIVE_INTEGER = auto()
    EXTREME_INTEGER = auto()  # the ends of what is known of them: of a vocabulary, or of the dtype


Draw = Callable[[np.random.Generator, Kind], Any]  # a request of that kind; None: there is none of it
_FACTORS = {Kind.SMALL: 1e-3, Kind.LARGE: 1e3, Kind.VERY_LARGE: 1e6, Kind.ZERO: 0.0}
_INTEGERS = {  # first and last
    Kind.SMALL_INTEGER: (0, 9),
    Kind.LARGE_INTEGER: (500, 2000),
    Kind.VERY_LARGE_INTEGER: (1_000_000, 2_000_000),
    Kind.NEGATIVE_INTEGER: (-2000, -500),
    Kind.EXTREME_INTEGER: (-(1 << 64), 1 << 64),
}


def draw_like(example: Arrays, high: Sequence[int | None] | None = None, *, is_wide: bool = True) -> Draw:
    """Return a :data:`Draw` of requests that are tuples of arrays like those of ``example``.

    The first request drawn is the example itself: the model surely takes it.

    Args:
        example: Arrays of one request. Floats are scaled at random, integers taken from among themselves, 0 and 1.
        high: Of each array, the exclusive upper bound of its integers, from 0 on; None: not known.
        is_wide: Draw integers whose bound is not known over their whole dtype too. False where one outside of a table
            would end the process, as on a GPU.
    """
    bounds = [None] * len(example) if high is None else list(high)
    has_floats = any(array.dtype.kind in "fc" for array in example)
    spans = [_span(array, bound, is_wide=is_wide) for array, bound in zip(example, bounds, strict=True)]
    is_first = True

    def draw(rng: np.random.Generator, kind: Kind) -> tuple[Array, ...] | None:
        nonlocal is_first
        if is_first:
            is_first = False
            return tuple(array.copy() for array in example)
        if kind in _INTEGERS:
            drawn = [_integers(*each, rng, kind) for each in zip(example, spans, strict=True)]
            if all(one is None for one in drawn):
                return None
        elif kind is Kind.OTHER_LENGTH or (kind is not Kind.ORDINARY and not has_floats):
            return None
        else:
            drawn = [None] * len(example)
        return tuple(
            _like(array, bound, rng, kind) if one is None else one
            for array, bound, one in zip(example, bounds, drawn, strict=True)
        )

    return draw


def _span(array: Array, high: int | None, *, is_wide: bool) -> tuple[int, int] | None:
    """Return the first and the last integer to draw; None: those of the example are all that is known."""
    if array.dtype.kind not in "iu" or (high is None and not is_wide):
        return None
    return (0, high - 1) if high is not None else (int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max))


def _integers(array: Array, span: tuple[int, int] | None, rng: np.random.Generator, kind: Kind) -> Array | None:
    """Return integers of one kind; None: the array has none of it."""
    if array.dtype.kind == "b" and kind in (Kind.SMALL_INTEGER, Kind.EXTREME_INTEGER):
        return np.full(array.shape, kind is Kind.EXTREME_INTEGER)
    if span is None:
        return None
    first, last = max(span[0], _INTEGERS[kind][0]), min(span[1], _INTEGERS[kind][1])
    if first > last:
        return None
    if kind is not Kind.EXTREME_INTEGER:
        return rng.integers(first, last, array.shape, endpoint=True).astype(array.dtype)
    return np.where(rng.integers(0, 2, array.shape) == 0, np.array(first, array.dtype), np.array(last, array.dtype))


def _like(array: Array, high: int | None, rng: np.random.Generator, kind: Kind) -> Array:
    if array.dtype.kind not in "fc":
        known = np.arange(2) if array.dtype.kind == "b" else np.union1d(array, [0, 1]) if high is None else None
        drawn = rng.integers(0, high, array.shape) if known is None else rng.choice(known, array.shape)
        return np.asarray(drawn).astype(array.dtype)
    values = np.asarray(array, np.float64 if array.dtype.kind == "f" else np.complex128)
    values = np.where(np.isfinite(values), values, 1.0) * rng.uniform(0.5, 1.5, array.shape)
    if not values.any():
        values = rng.standard_normal(array.shape)
    if kind in (Kind.POSITIVE, Kind.NEGATIVE):
        values = np.abs(values) * (1 if kind is Kind.POSITIVE else -1)
    elif kind is Kind.HUGE:
        values = np.full(array.shape, np.finfo(array.dtype).max / 2)
    elif kind in (Kind.INFINITE, Kind.NAN):
        values = np.full(array.shape, np.inf if kind is Kind.INFINITE else np.nan)
    with np.errstate(all="ignore"):  # half precision has no numbers a million times as large: they are infinite
        return np.asarray(values * _FACTORS.get(kind, 1.0)).astype(array.dtype)


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
