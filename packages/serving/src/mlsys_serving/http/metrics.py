"""Prometheus metrics of one HTTP front, in a registry of its own: several apps in one process do not mix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

UNMATCHED = "<unmatched>"  # the one route label of all paths that match no route: clients cannot add labels
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# Seconds. From a cache hit to a long generation.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """The metrics every front has.

    Args:
        registry: their registry; ``/metrics`` shows all of it.

    Example:
        >>> metrics = HttpMetrics(CollectorRegistry())
        >>> metrics.observe("/v1/models", "GET", 200, duration_s=0.01)
        >>> labels = {"route": "/v1/models", "method": "GET", "status": "200"}
        >>> metrics.registry.get_sample_value("mlsys_http_requests_total", labels)
        1.0
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.in_flight = Gauge(
            "mlsys_http_requests_in_flight", "Requests whose response has not ended", registry=registry
        )
        self._requests = Counter(
            "mlsys_http_requests", "Requests answered", ("route", "method", "status"), registry=registry
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}  # looking one up by labels is slow
        self._duration = Histogram(
            "mlsys_http_request_duration_seconds",
            "From the request's headers to the end of its response",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )

    def observe(self, route: str, method: str, status: int, *, duration_s: float) -> None:
        """Count one ended request; ``route`` is a template such as ``/v1/models/{name}``."""
        method = method if method in _METHODS else "OTHER"
        key = (route, method, status)
        children = self._children.get(key)
        if children is None:
            children = (self._requests.labels(route, method, str(status)), self._duration.labels(route, method))
            self._children[key] = children
        requests, duration = children
        requests.inc()
        duration.observe(duration_s)
