"""Workloads: arrivals and lengths make a trace, the load generator fires it at a target, results sum it up.

Data flow: ``arrivals`` + ``lengths`` -> ``trace`` -> ``loadgen``, with a target -> ``records`` -> ``results`` ->
``tables`` and :mod:`mlsys_core.plot`. The target for servers, ``http_target``, imports an HTTP client and is not
imported here.
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
from mlsys_core.workload.loadgen import LoadOptions, LoadProgress, run_load, run_load_blocking
from mlsys_core.workload.records import LatencyBounds, LatencySummary, RequestRecord
from mlsys_core.workload.results import Goodput, LoadPoint, LoadResult, load_result
from mlsys_core.workload.targets import InProcessTarget, OnToken, Outcome, Target
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
    "Goodput",
    "InProcessTarget",
    "LatencyBounds",
    "LatencySummary",
    "Lengths",
    "LoadOptions",
    "LoadPoint",
    "LoadProgress",
    "LoadResult",
    "LogNormal",
    "OnOff",
    "OnToken",
    "Outcome",
    "Poisson",
    "Replay",
    "RequestRecord",
    "Stepping",
    "Target",
    "Trace",
    "TraceItem",
    "Uniform",
    "load_result",
    "make_trace",
    "read_trace",
    "run_load",
    "run_load_blocking",
    "write_trace",
]
