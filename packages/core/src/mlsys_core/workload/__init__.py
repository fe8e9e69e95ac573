"""Workloads: when requests arrive, and the latencies of a run.

Lengths, traces and the load generator are ``mlsys_bench.workload``.
"""

from mlsys_core.workload.arrivals import (
    Arrivals,
    Bursty,
    ClosedLoop,
    ConstantRate,
    OnOff,
    Poisson,
    Replay,
    Stepping,
)
from mlsys_core.workload.latency import LatencySummary, LoadPoint

__all__ = [
    "Arrivals",
    "Bursty",
    "ClosedLoop",
    "ConstantRate",
    "LatencySummary",
    "LoadPoint",
    "OnOff",
    "Poisson",
    "Replay",
    "Stepping",
]
