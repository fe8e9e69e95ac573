"""Workloads: when requests arrive, and the latencies of a run.

Poisson arrivals are a unit-rate process on a rescaled time axis, so that with one seed a load sweep sends the same
pattern, only faster (ORCA, section 6: the same trace, its arrival times adjusted to the rate).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean ``1 / rate`` seconds (ORCA 6, BatchMaker 7.1, DVABatch 8.1).

    Example:
        >>> Poisson(4.0).times(3, np.random.default_rng(0)).round(2).tolist()
        [0.17, 0.42, 0.43]
    """

    rate: float  # requests per second

    def __post_init__(self) -> None:
        require_positive("the arrival rate", self.rate)

    def times(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the first ``n`` arrival times: float64 ``[n]``, seconds from the start, non-decreasing."""
        return np.asarray(np.cumsum(rng.exponential(size=n)) / self.rate)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """A distribution of durations in seconds (percentiles interpolate linearly)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, durations_s: Iterable[float | None]) -> LatencySummary | None:
        """Return the summary of the durations that are not None; None if there are none.

        Example:
            >>> LatencySummary.of([0.1, None, 0.3]).mean
            0.2
        """
        values = np.asarray([value for value in durations_s if value is not None], dtype=np.float64)
        if values.size == 0:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(values.size, float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One run as a point of a load curve (see :mod:`mlsys_core.plot`)."""

    offered_rps: float | None  # arrivals per second; None in a closed loop, where the server sets them
    throughput_rps: float  # successful requests per second
    latency: LatencySummary
    normalized_latency: LatencySummary | None = None  # per output token; None if token counts are unknown


def require_positive(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number above zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number above 0")
