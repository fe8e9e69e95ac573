"""Latencies of a run, and the run as a point of a load curve; made by replays, load generators and simulators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


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
