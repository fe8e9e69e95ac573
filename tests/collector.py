"""A collector of OpenTelemetry on a local port: what servers send is decoded by the protocol's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


class Collector:
    """Spans that have come, and their resources."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self._come = threading.Condition()

    def take(self, body: bytes) -> None:
        """Decode one export."""
        request = service.ExportTraceServiceRequest.FromString(body)
        with self._come:
            for resource in request.resource_spans:
                self.services.add(facts_of(resource.resource)["service.name"])
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
            self._come.notify_all()

    def wait(self, name: str, count: int = 1, timeout_s: float = 240.0) -> list[Any]:
        """Return the spans whose name begins with ``name``, when there are ``count``."""

        def found() -> list[Any]:
            return [span for span in self.spans if span.name.startswith(name)]

        with self._come:
            assert self._come.wait_for(lambda: len(found()) >= count, timeout_s), [span.name for span in self.spans]
            return found()

    def below(self, span: Any) -> dict[str, Any]:
        """Return the children of a span by name."""
        return {each.name: each for each in self.spans if each.parent_span_id == span.span_id}


def facts_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
