"""Checks of numbers that come from outside, shared by the modules of this package."""

from __future__ import annotations

import math
from numbers import Integral, Real

from mlsys_core.errors import InvalidInputError


def require_positive(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number above zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number above 0")


def require_not_negative(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number of at least zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number of at least 0")


def require_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise InvalidInputError(f"{name} is {value!r}: give a whole number of at least {minimum}")
