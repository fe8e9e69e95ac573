"""Traces of HTTP requests, as a collector gets them."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mlsys_serving.http import BackgroundServer, ClosingStreamingResponse, HttpConfig, Router, create_app
from mlsys_serving.http.record import make_logger
from mlsys_serving.tracing import TraceConfig, current_trace

from tests.collector import Collector, collecting, facts_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def app_of(endpoint: str | None, log: io.StringIO, **config: Any) -> FastAPI:
    router = Router()

    @router.get("/items/{number}")
    async def item(number: int) -> dict[str, bool]:
        if number == 9:
            raise RuntimeError("a defect")
        return {"traced": current_trace.get() is not None}

    @router.get("/stream")
    async def stream() -> ClosingStreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield f"data: {current_trace.get() is not None}\n\n"
            await asyncio.sleep(0.05)
            yield "data: 2\n\n"

        return ClosingStreamingResponse(parts(), media_type="text/event-stream")

    traces = None if endpoint is None else TraceConfig(endpoint)
    http = HttpConfig(title="words", traces=traces, **config)
    return create_app(http, routers=[router], logger=make_logger("json", stream=log))


def test_a_request_is_a_child_of_its_clients_span(collector: Collector) -> None:
    log = io.StringIO()
    with BackgroundServer(app_of(collector.url, log)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        assert httpx.get(f"{server.url}/items/3", headers=headers).json() == {"traced": True}
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
    (span,) = collector.spans  # health checks have none; what was not sent before is sent at the end
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "GET /items/{number}"
    facts = facts_of(span)
    assert (facts["http.response.status_code"], facts["mlsys.request_id"]) == (200, "mine")
    assert 0 <= span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 60
    assert collector.services == {"words"}
    (line,) = [json.loads(line) for line in log.getvalue().splitlines() if "/items" in line]
    assert line["trace_id"] == TRACE


def test_a_stream_lasts_until_its_last_byte_and_a_defect_is_an_error(collector: Collector) -> None:
    with BackgroundServer(app_of(collector.url, io.StringIO())) as server:
        assert httpx.get(f"{server.url}/stream").text.startswith("data: True")
        assert httpx.get(f"{server.url}/items/9").status_code == 500
        assert httpx.get(f"{server.url}/nothing").status_code == 404
    stream, defect, unmatched = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert stream.end_time_unix_nano - stream.start_time_unix_nano >= 0.05e9
    assert facts_of(stream)["mlsys.is_complete"] is True
    assert [span.status.code == span.status.STATUS_CODE_ERROR for span in (stream, defect, unmatched)] == [0, 1, 0]
    assert unmatched.name == "GET <unmatched>"
    assert len({span.trace_id for span in collector.spans}) == 3


@pytest.mark.parametrize("traceparent", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
def test_a_bad_traceparent_begins_a_trace_of_its_own(collector: Collector, traceparent: str) -> None:
    with BackgroundServer(app_of(collector.url, io.StringIO())) as server:
        assert httpx.get(f"{server.url}/items/1", headers={"traceparent": traceparent}).status_code == 200
    (span,) = collector.spans
    assert not span.parent_span_id


def test_what_the_client_does_not_sample_is_not_traced(collector: Collector) -> None:
    with BackgroundServer(app_of(collector.url, io.StringIO())) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert httpx.get(f"{server.url}/items/3", headers=headers).json() == {"traced": False}
    assert not collector.spans


def test_opentelemetrys_variables_are_honoured(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with BackgroundServer(app_of(collector.url, io.StringIO())) as server:
        httpx.get(f"{server.url}/items/3")
    assert collector.services == {"mine"}


def test_a_collector_that_is_not_there_costs_no_request() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with BackgroundServer(app_of(url, io.StringIO())) as server:
            assert httpx.get(f"{server.url}/items/3").json() == {"traced": True}


def test_without_traces_nothing_is_in_the_way() -> None:
    app = app_of(None, io.StringIO())
    names = {getattr(middleware.cls, "__name__", "") for middleware in app.user_middleware}
    assert "ObserveMiddleware" in names
    assert "TraceMiddleware" not in names


def test_a_server_without_traces_imports_no_sdk() -> None:
    code = (
        "import sys, mlsys_serving.models, mlsys_serving.http as http\n"
        "http.create_app(http.HttpConfig())\n"
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
