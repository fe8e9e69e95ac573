"""Traces of requests, exported over OTLP (``docs/tracing.md``).

:mod:`record` has the facts that fronts and engines note while a request runs, plain data in any thread; :mod:`otlp`
turns them into spans, by a pure function, and hands those to OpenTelemetry's SDK, which samples and sends them.
A server without traces has no middleware for them, and its engines look once per request whether there is one.
"""

from mlsys_serving.tracing.config import TraceConfig, trace_config
from mlsys_serving.tracing.record import EngineTrace, EngineTraces, RequestTrace, current_trace

__all__ = ["EngineTrace", "EngineTraces", "RequestTrace", "TraceConfig", "current_trace", "trace_config"]
