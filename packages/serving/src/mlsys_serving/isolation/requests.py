"""Requests to try a model with: ordinary ones, and ones that a hostile client might send."""

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


Draw = Callable[[np.random.Generator, Kind], Any]  # a request of that kind; None: there is none of it
_FACTORS = {Kind.SMALL: 1e-3, Kind.LARGE: 1e3, Kind.VERY_LARGE: 1e6, Kind.ZERO: 0.0}


def draw_like(example: Arrays, high: Sequence[int | None] | None = None) -> Draw:
    """Return a :data:`Draw` of requests that are tuples of arrays like those of ``example``.

    The first request drawn is the example itself: the model surely takes it.

    Args:
        example: Arrays of one request. Floats are scaled at random, integers taken from among themselves, 0 and 1.
        high: Of each array, the exclusive upper bound of its integers, from 0 on; None: not known.
    """
    bounds = [None] * len(example) if high is None else list(high)
    has_floats = any(array.dtype.kind in "fc" for array in example)
    is_first = True

    def draw(rng: np.random.Generator, kind: Kind) -> tuple[Array, ...] | None:
        nonlocal is_first
        if is_first:
            is_first = False
            return tuple(array.copy() for array in example)
        if kind is Kind.OTHER_LENGTH or (kind is not Kind.ORDINARY and not has_floats):
            return None
        return tuple(_like(array, bound, rng, kind) for array, bound in zip(example, bounds, strict=True))

    return draw


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
