"""Prometheus metrics of the models: Triton's names, and histograms of our own. Read from the statistics when scraped.

Triton's counters have no ``_total`` at their ends, which Prometheus' library requires for the type counter; so they
are of the type unknown here. Functions like ``rate()`` do not look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.registry import Collector

from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.models.statistics import Histogram, VersionStatistics
from mlsys_serving.models.version import Version


class ModelMetrics(Collector):
    """Collector of the metrics of a repository's ready models.

    Args:
        repository: the models.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def collect(self) -> Iterable[Metric]:
        """Return all current metrics."""
        versions = [(_labels(version), version, version.statistics) for version in self._repository.versions()]
        for name, help_text, value_of in _NUMBERS:
            metric = Metric(name, help_text, "unknown")
            for labels, _, statistics in versions:
                metric.add_sample(name, labels, value_of(statistics))
            yield metric
        failures = Metric("nv_inference_request_failure", "Requests failed, by reason", "unknown")
        pending = Metric("nv_inference_pending_request_count", "Requests that run or wait", "gauge")
        for labels, version, statistics in versions:
            for reason, count in statistics.failures.items():
                failures.add_sample(failures.name, labels | {"reason": reason.value}, count)
            pending.add_sample(pending.name, labels, version.num_running)
        yield from (failures, pending)
        for name, help_text, histogram_of in _HISTOGRAMS:
            yield _histogram(name, help_text, [(labels, histogram_of(found)) for labels, _, found in versions])


def _num_executions(statistics: VersionStatistics) -> float:
    return sum(counts.count for counts in statistics.executions())


_NUMBERS: tuple[tuple[str, str, Callable[[VersionStatistics], float]], ...] = (
    ("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    ("nv_inference_count", "Rows inferred; a batch of n counts n", lambda s: s.num_rows),
    ("nv_inference_exec_count", "Executions of the model; a batch counts 1", _num_executions),
    ("mlsys_inference_repeated", "Runs of requests whose worker had died before", lambda s: s.num_repeated),
    ("nv_inference_request_duration_us", "Time of requests answered, summed", lambda s: s.success.total_s * 1e6),
    ("nv_inference_queue_duration_us", "Time they waited, summed", lambda s: s.queue.total_s * 1e6),
    ("nv_inference_compute_input_duration_us", "Time to gather inputs", lambda s: s.compute_input.total_s * 1e6),
    ("nv_inference_compute_infer_duration_us", "Time to compute", lambda s: s.compute_infer.total_s * 1e6),
    ("nv_inference_compute_output_duration_us", "Time to scatter outputs", lambda s: s.compute_output.total_s * 1e6),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[VersionStatistics], Histogram]], ...] = (
    ("mlsys_inference_queue_seconds", "Time a request waited", lambda s: s.queue_histogram),
    ("mlsys_inference_compute_seconds", "Time a request was computed", lambda s: s.compute_histogram),
    ("mlsys_inference_first_response_seconds", "Until a stream's first response", lambda s: s.first_response_histogram),
)


def _labels(version: Version) -> dict[str, str]:
    return {"model": version.spec.name, "version": version.spec.version}


def _histogram(name: str, help_text: str, histograms: Iterable[tuple[dict[str, str], Histogram]]) -> Metric:
    metric = Metric(name, help_text, "histogram")
    for labels, histogram in histograms:
        cumulative = histogram.cumulative()
        for bound, count in cumulative:
            metric.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
        metric.add_sample(f"{name}_count", labels, cumulative[-1][1])
        metric.add_sample(f"{name}_sum", labels, histogram.total_s)
    return metric
