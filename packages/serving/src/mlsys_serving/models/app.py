"""The app of a server of models: it loads a repository, and serves it through the fronts that are installed.

Its metrics have Triton's names, beside histograms of our own; they are read from the statistics when scraped.
Triton's counters have no ``_total`` at their ends, which Prometheus' library requires for the type counter; so they
are of the type unknown here. Functions like ``rate()`` do not look at it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from mlsys_core.loop.protocols import Clock
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import ErrorFormat, HttpConfig, create_app
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.models.statistics import Histogram, VersionStatistics
from mlsys_serving.models.version import Version
from mlsys_serving.watch import Source, Watch

DEFAULT_CONFIG = HttpConfig(max_body_nbytes=64 * 1024 * 1024, validation_status=400)


class ModelError(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: str = Field(description="What was wrong and what to do about it")


ERROR_FORMAT = ErrorFormat(body=lambda info: {"error": info.message}, model=ModelError)


def create_model_app(
    repository: ModelRepository,
    *,
    system: str,
    extensions: Extensions,
    unit: str = "batch",
    config: HttpConfig | None = None,
    routers: Sequence[APIRouter] = (),
    error_format: ErrorFormat = ERROR_FORMAT,
    registry: CollectorRegistry | None = None,
    clock: Clock | None = None,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> FastAPI:
    """Return an app that serves ``repository``; it loads all models first, and closes them at the end.

    Args:
        repository: The models; belongs to the app from now on.
        system: Name of the subsystem, for extensions.
        extensions: Additions of other distributions, the fronts of models among them.
        unit: Name of a batch on the live page; models with an attribute ``score_source`` are on it.
        config: Limits, keys, names; default ``DEFAULT_CONFIG``.
        routers: Further routes of the subsystem.
        error_format: The shape of errors; another, where the app gets routes of other protocols too.
        registry: Of metrics; subsystems register their collectors in it.
        clock: Of deadlines; give it the serving loop's. Default ``WallClock``.
        logger: Default one that writes ``config.log_format`` to stderr.

    Returns:
        The app, for ``mlsys_serving.http.serve`` or ``BackgroundServer``. A model that cannot be loaded, or a port
        that is taken, ends its start.
    """
    config = config or DEFAULT_CONFIG
    registry = CollectorRegistry() if registry is None else registry
    registry.register(ModelMetrics(repository))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await repository.load_all()
            yield
        finally:
            await repository.close()

    watch = _watch(repository, unit)
    return create_app(
        config,
        routers=routers,
        lifespan=lifespan,
        served=Served(system=system, extensions=extensions, models=repository, watch=watch),
        error_format=error_format,
        registry=registry,
        clock=clock,
        logger=logger,
    )


def _watch(repository: ModelRepository, unit: str) -> Watch:
    """Return how all models can be watched, those that come later among them."""

    def sources() -> list[Source]:
        found = [getattr(version.model, "score_source", None) for version in repository.versions()]
        return [source for source in found if source is not None]

    def facts() -> dict[str, Any]:
        return {"models": [version.spec.name for version in repository.versions()], "protocol": "oip"}

    return Watch(unit=unit, facts=facts, sources=sources)


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
