"""Arrival processes beside Poisson's (:class:`mlsys_core.workload.Poisson`).

A process turns a random generator into arrival times in seconds. Arrivals and lengths make a trace (:mod:`.trace`),
which the load generator fires. A process is a frozen record of its parameters; all randomness comes from the generator
passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol, TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.float64]  # [n] seconds from the start of the run, non-decreasing


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """Return the first ``n`` arrival times: float64 ``[n]``, seconds from the start, non-decreasing, 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request ``think_time_s`` after its last one ended.

    Sending times depend on the server, so all times are 0 ("as soon as a client is free") and the load generator
    takes this record as its mode.

    Example:
        >>> ClosedLoop(8).times(2, np.random.default_rng()).tolist()
        [0.0, 0.0]
    """

    concurrency: int
    think_time_s: float = 0.0

    def __post_init__(self) -> None:
        require_count("the concurrency", self.concurrency)
        require_not_negative("the think time", self.think_time_s)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        return np.zeros(n, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests arrive at the start of the run."""

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        return np.zeros(n, dtype=np.float64)


def require_not_negative(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number of at least zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number of at least 0")


def require_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise InvalidInputError(f"{name} is {value!r}: give a whole number of at least {minimum}")
