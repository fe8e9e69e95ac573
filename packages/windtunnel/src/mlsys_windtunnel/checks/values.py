"""Refusals of numbers by an operator's source: missing, infinite and too large ones, and those out of its domain.

Plain data beside the operator (see ``network.Wire``), so it is saved with it and needs no scikit-learn. The messages
keep scikit-learn's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

Floats = npt.NDArray[np.float64]

TAME = 1e70  # sum of squares below which each number is finite and far within float32
BEYOND_FLOAT32 = float(np.finfo(np.float32).max) + 2.0**103  # the least that rounds to infinity


@dataclass(frozen=True, slots=True)
class Contract:
    """Numbers that an estimator takes."""

    estimator: str  # its class, for messages
    takes_nan: bool = False
    takes_inf: bool = False
    rounds_to_float32: bool = False  # and so refuses what is infinite in float32
    low: float | None = None  # the least number
    high: float | None = None  # the largest

    @property
    def takes_all(self) -> bool:
        """Return whether nothing is refused."""
        return self.takes_nan and self.takes_inf and not self.has_bounds

    @property
    def has_bounds(self) -> bool:
        """Return whether finite numbers may be refused."""
        refuses_large = self.rounds_to_float32 and not self.takes_inf
        return refuses_large or self.low is not None or self.high is not None

    @property
    def is_finite(self) -> bool:
        """Return whether just the numbers that are finite in float64 are taken."""
        return not (self.takes_nan or self.takes_inf or self.has_bounds)

    def is_like(self, other: Contract) -> bool:
        """Return whether the same numbers are taken."""
        return self._taken() == other._taken()

    def _taken(self) -> tuple[object, ...]:
        return self.takes_nan, self.takes_inf, self.rounds_to_float32, self.low, self.high

    @property
    def refusal(self) -> str:
        """Name the values that are refused, in one line, for programs that cannot say which cell it was."""
        what = [
            "" if self.takes_nan else "NaN",
            "" if self.takes_inf else "infinity",
            "" if self.takes_inf or not self.rounds_to_float32 else "a value too large for dtype('float32')",
            "" if self.low is None else f"a number below {self.low:g}",
            "" if self.high is None else f"a number above {self.high:g}",
        ]
        return f"Input X contains {' or '.join(filter(None, what))}, which {self.estimator} refuses"

    def check(self, x: Floats) -> None:
        """Look at a table ``[rows, columns]``: one pass where all is in order.

        Raises:
            InvalidInputError: the source refuses it.
        """
        if not is_tame(x):
            self._check_finite(x)
        if self.low is not None or self.high is not None:
            self._check_bounds(x)

    def _check_finite(self, x: Floats) -> None:
        if not self.takes_nan and np.isnan(x).any():
            raise InvalidInputError(
                f"Input X contains NaN. {self.estimator} does not accept missing values encoded as NaN natively; fill "
                "them in, as an imputer in the pipeline does, or drop those rows"
            )
        if self.takes_inf:
            return
        if np.isinf(x).any() or (self.rounds_to_float32 and bool((np.abs(x) >= BEYOND_FLOAT32).any())):
            kind = "float32" if self.rounds_to_float32 else "float64"
            raise InvalidInputError(
                f"Input X contains infinity or a value too large for dtype('{kind}'), which {self.estimator} refuses"
            )

    def _check_bounds(self, x: Floats) -> None:
        if self.low is not None and bool((x < self.low).any()):
            raise InvalidInputError(
                f"Input X contains {np.nanmin(x):g}; {self.estimator} takes no numbers below {self.low:g}"
            )
        if self.high is not None and bool((x > self.high).any()):
            raise InvalidInputError(
                f"Input X contains {np.nanmax(x):g}; {self.estimator} takes no numbers above {self.high:g}"
            )


def rounded(x: Floats, dtype: str) -> npt.NDArray[Any]:
    """Round a table to the dtype of a network.

    Raises:
        InvalidInputError: a finite number is infinite there, where the source would answer for it.
    """
    if dtype == "float64":
        return x
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype)
    if bool((np.isinf(narrow) & np.isfinite(x)).any()):
        raise InvalidInputError(
            f"Input X contains a value too large for dtype('{dtype}'), which this module computes in; translate with "
            "dtype=torch.float64"
        )
    return narrow


def is_tame(x: npt.NDArray[Any]) -> bool:
    """Return whether all numbers are finite and none is large: one pass, without a temporary."""
    flat = x.ravel("K")
    return bool(flat.dot(flat) <= TAME)  # the method: numpy's functions cost a dispatch, which shows at one row
