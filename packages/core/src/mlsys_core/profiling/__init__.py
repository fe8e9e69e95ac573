"""Profiling: a recorder for hot loops, trace files, summaries of distributions, and profile tables.

Recorder -> Recording -> Chrome-trace file, or summary; measure -> ProfileTable -> ProfileCache.
"""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_core.profiling.chrome_trace import read_trace, write_trace
    from mlsys_core.profiling.profile_table import ProfileCache, ProfileKey, ProfileTable, UnitProfile, measure
    from mlsys_core.profiling.recorder import NULL_RECORDER, Recorder
    from mlsys_core.profiling.recording import Recording
    from mlsys_core.profiling.spans import SpanContext
    from mlsys_core.profiling.summary import Distribution, RecordingSummary, summarise, summarise_recording

__all__ = [
    "NULL_RECORDER",
    "Distribution",
    "ProfileCache",
    "ProfileKey",
    "ProfileTable",
    "Recorder",
    "Recording",
    "RecordingSummary",
    "SpanContext",
    "UnitProfile",
    "measure",
    "read_trace",
    "summarise",
    "summarise_recording",
    "write_trace",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "chrome_trace": ["read_trace", "write_trace"],
        "profile_table": ["ProfileCache", "ProfileKey", "ProfileTable", "UnitProfile", "measure"],
        "recorder": ["NULL_RECORDER", "Recorder"],
        "recording": ["Recording"],
        "spans": ["SpanContext"],
        "summary": ["Distribution", "RecordingSummary", "summarise", "summarise_recording"],
    },
)
