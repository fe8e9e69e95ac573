"""Turn facts into spans and hand them to OpenTelemetry's SDK, which samples and sends them from its own thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mlsys_core import __version__
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mlsys_serving.tracing.config import TraceConfig
from mlsys_serving.tracing.record import EngineTrace, Fact, Note, RequestTrace


@dataclass(frozen=True, slots=True)
class Span:
    """Span to be exported, with those within it. Times are seconds of ``time.perf_counter``."""

    name: str
    start_s: float
    end_s: float
    facts: dict[str, Fact]
    notes: tuple[Note, ...] = ()
    children: tuple[Span, ...] = ()
    is_error: bool = False


def span_of(part: EngineTrace, now_s: float) -> Span:
    """Return the span of a request in an engine: its wait and its run are children.

    Args:
        part: The facts.
        now_s: End of its client's request, for what has not ended.

    Example:
        >>> part = EngineTrace("infer", "m", 1.0, started_s=1.5, ended_s=3.0, reason="done")
        >>> [(child.name, child.end_s - child.start_s) for child in span_of(part, 9.0).children]
        [('queue', 0.5), ('run', 1.5)]
    """
    end_s = max(part.submitted_s, now_s if part.ended_s is None else part.ended_s)
    started_s = end_s if part.started_s is None else min(max(part.started_s, part.submitted_s), end_s)
    facts: dict[str, Fact] = {"mlsys.model": part.model, "mlsys.finish_reason": part.reason or "abandoned"}
    children = [Span("queue", part.submitted_s, started_s, {})]
    notes = list(part.notes)
    if part.started_s is not None:
        ran: dict[str, Fact] = {"mlsys.batches": part.num_batches, "mlsys.executor_s": part.executor_s}
        if part.num_batches:
            ran["mlsys.neighbours.mean"] = part.num_neighbours / part.num_batches
            ran["mlsys.neighbours.max"] = part.max_neighbours
        if part.first_output_s is not None:
            notes.append(Note("first output", part.first_output_s))
            facts["mlsys.first_output_s"] = part.first_output_s - part.submitted_s
        children.append(Span("run", started_s, end_s, ran, tuple(sorted(notes, key=lambda note: note.at_s))))
        notes = []
    return Span(
        f"{part.operation} {part.model}",
        part.submitted_s,
        end_s,
        {**facts, **part.facts},
        tuple(notes),
        tuple(children),
        is_error=part.reason in ("failed", "error"),
    )


_FLUSH_S = 3.0  # that a collector may take for the last spans of a server that ends


class OpenRequest:
    """Span of a client's request while it runs."""

    __slots__ = ("_offset_ns", "span", "trace")

    def __init__(self, span: OtelSpan, offset_ns: int) -> None:
        self.span, self._offset_ns = span, offset_ns
        self.trace = RequestTrace()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, for logs."""
        return f"{self.span.get_span_context().trace_id:032x}"

    def wall_ns(self, at_s: float) -> int:
        """Return a time of ``time.perf_counter`` as nanoseconds since the epoch."""
        return round(at_s * 1e9) + self._offset_ns


class Tracer:
    """Tracer of one server. Make it in the process that serves, since its thread does not survive a fork; close it.

    The SDK reads ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_*``,
    ``OTEL_EXPORTER_OTLP_*`` and ``OTEL_SDK_DISABLED``.

    Args:
        config: Where spans go.
        service: Name of the service where the environment gives none.
    """

    def __init__(self, config: TraceConfig, *, service: str) -> None:
        resource = Resource({"service.version": __version__}).merge(Resource.create())
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.url)))
        self._tracer = self._provider.get_tracer("mlsys", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str], facts: Mapping[str, Fact]) -> Iterator[OpenRequest | None]:
        """Open the span of a request, a child of the client's if ``headers`` bring a W3C ``traceparent``.

        Yields None for a request that the sampler leaves out. What was noted in the yielded trace is exported when the
        context ends.
        """
        offset_ns = time.time_ns() - time.perf_counter_ns()
        parent = self._propagator.extract(headers, context=Context())
        span = self._tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, attributes=dict(facts), record_exception=False
        )
        if not span.is_recording():
            yield None
            return
        opened = OpenRequest(span, offset_ns)
        try:
            yield opened
        finally:
            self._finish(opened)

    def close(self) -> None:
        """Send what has not been sent, for three seconds at most, and end the thread."""
        self._provider.force_flush(round(_FLUSH_S * 1000))
        self._provider.shutdown()

    def _finish(self, opened: OpenRequest) -> None:
        now_s, within, trace = time.perf_counter(), set_span_in_context(opened.span, Context()), opened.trace
        for part in trace.parts:
            self._export(span_of(part, now_s), within, opened)
        if trace.num_untraced:
            opened.span.set_attribute("mlsys.untraced_parts", trace.num_untraced)
        if trace.name is not None:
            opened.span.update_name(trace.name)
        if trace.is_error:
            opened.span.set_status(Status(StatusCode.ERROR))
        opened.span.set_attributes(trace.facts)
        opened.span.end(opened.wall_ns(now_s))

    def _export(self, span: Span, within: Context, opened: OpenRequest) -> None:
        made = self._tracer.start_span(
            span.name, context=within, attributes=span.facts, start_time=opened.wall_ns(span.start_s)
        )
        for note in span.notes:
            made.add_event(note.name, note.facts, opened.wall_ns(note.at_s))
        if span.is_error:
            made.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(made, Context())
        for child in span.children:
            self._export(child, below, opened)
        made.end(opened.wall_ns(span.end_s))
