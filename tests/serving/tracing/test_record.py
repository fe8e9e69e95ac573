"""Facts about a request, and the spans that are made of them: no clock, no SDK."""

from __future__ import annotations

import pytest
from mlsys_core.config import read_settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import InlineExecutor, ServeRequest, ServingLoop, WallClock
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_serving.tracing import EngineTrace, EngineTraces, RequestTrace, TraceConfig, current_trace, trace_config
from mlsys_serving.tracing import config as config_module
from mlsys_serving.tracing.otlp import span_of
from mlsys_serving.tracing.record import MAX_NOTED_BATCHES


def opened(traces: EngineTraces, *request_ids: str) -> RequestTrace:
    trace = RequestTrace()
    token = current_trace.set(trace)
    for request_id in request_ids:
        assert traces.open(request_id, operation="infer", model="m") is not None
    current_trace.reset(token)
    return trace


def test_without_a_trace_nothing_is_kept() -> None:
    traces = EngineTraces(lambda batch: pytest.fail("nobody asks for the members of a batch"))
    assert traces.open("a", operation="infer", model="m") is None
    traces.on_batch(("a",), 0.0, 1.0)
    assert not traces


def test_batches_are_summed_and_the_first_are_noted_one_by_one() -> None:
    traces = EngineTraces(lambda batch: batch)
    (part,) = opened(traces, "a").parts
    for number in range(100):
        traces.on_batch(["a", *map(str, range(number % 3))], number, number + 0.5)
    assert (part.num_batches, part.num_neighbours, part.max_neighbours, part.executor_s) == (100, 99, 2, 50.0)
    assert [note.facts["mlsys.neighbours"] for note in part.notes] == [n % 3 for n in range(MAX_NOTED_BATCHES)]
    traces.close("a", "done")
    assert not traces


def test_parts_of_one_request_are_bounded() -> None:
    traces, trace = EngineTraces(lambda batch: batch), RequestTrace()
    token = current_trace.set(trace)
    made = [traces.open(str(number), operation="infer", model="m") for number in range(200)]
    current_trace.reset(token)
    assert (len(trace.parts), trace.num_untraced) == (128, 72)
    assert sum(part is None for part in made) == 72


def test_a_span_holds_its_children_whatever_is_missing() -> None:
    refused = span_of(EngineTrace("infer", "m", 5.0, ended_s=5.0, reason="refused"), 9.0)
    assert [child.name for child in refused.children] == ["queue"]
    running = span_of(EngineTrace("infer", "m", 5.0, started_s=4.0), 9.0)
    assert running.facts["mlsys.finish_reason"] == "abandoned"
    for span in (refused, running):
        assert all(span.start_s <= child.start_s <= child.end_s <= span.end_s for child in span.children)


def test_the_loop_notes_who_ran_beside_whom() -> None:
    traces: EngineTraces = EngineTraces(lambda batch: [request.request_id for request in batch.requests])
    executor = InlineExecutor(lambda batch: [request.payload for request in batch.requests])
    trace = opened(traces, "a", "c")
    with ServingLoop(ZeroBatch(max_batch_size=2), executor, WallClock(), traces=traces) as loop:
        for name in "abc":
            loop.submit(ServeRequest(name, name), name)
        loop.drain()
    assert [(part.num_batches, part.num_neighbours) for part in trace.parts] == [(1, 1), (1, 0)]
    assert all(part.started_s is not None and part.submitted_s <= part.started_s for part in trace.parts)


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "ftp://collector", "http://", "http://a:99999", "http://a?b=c", ""]
)
def test_bad_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInputError, match="http://HOST:4318"):
        TraceConfig(endpoint)


@pytest.mark.parametrize("endpoint", ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"])
def test_the_path_is_the_protocols(endpoint: str) -> None:
    assert TraceConfig(endpoint).url == "http://a:4318/v1/traces"


def test_without_the_packages_an_option_is_refused_and_a_variable_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_PACKAGES", ("opentelemetry_that_is_not_there.sdk",))
    with pytest.raises(InvalidInputError, match="pip install"):
        trace_config("http://a:4318", is_in_environment=False)
    config, warning = trace_config(None, is_in_environment=True)
    assert config is None
    assert warning is not None
    assert "pip install" in warning
    assert trace_config(None, is_in_environment=False) == (None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
    ],
)
def test_opentelemetrys_own_variables(environ: dict[str, str], expected: bool) -> None:
    assert read_settings(environ).traces_in_environment is expected
