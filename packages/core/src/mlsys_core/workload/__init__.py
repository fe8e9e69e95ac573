"""Workloads: arrivals and lengths make a trace of requests; latencies sum up a run.

The load generator and the targets that it drives are ``mlsys_bench.workload``.
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
from mlsys_core.workload.lengths import (
    ORCA_OUTPUTS,
    ORCA_PROMPTS,
    WMT_SENTENCES,
    Constant,
    Empirical,
    Lengths,
    LogNormal,
    Uniform,
)
from mlsys_core.workload.trace import Trace, TraceItem, make_trace, read_trace, write_trace

__all__ = [
    "ORCA_OUTPUTS",
    "ORCA_PROMPTS",
    "WMT_SENTENCES",
    "Arrivals",
    "Bursty",
    "ClosedLoop",
    "Constant",
    "ConstantRate",
    "Empirical",
    "LatencySummary",
    "Lengths",
    "LoadPoint",
    "LogNormal",
    "OnOff",
    "Poisson",
    "Replay",
    "Stepping",
    "Trace",
    "TraceItem",
    "Uniform",
    "make_trace",
    "read_trace",
    "write_trace",
]
