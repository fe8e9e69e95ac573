"""Metrics of the engines on ``/metrics``, beside Triton's names: batches, padding, gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlsys_batchmaker.serve.oip_model import OipModel
from mlsys_batchmaker.serve.stream_model import OipStream

_LABELS = ("model", "version")
_COUNTERS = {
    "tasks": "Steps of batched tasks",
    "cells": "Cells computed, without padding",
    "padded_cells": "Cells computed, padding included",
    "discarded_cells": "Cells computed after their chain had stopped",
    "gathers": "Tasks whose set of requests was another than the task before",
    "copied_rows": "Rows fetched from another device",
}
_GAUGES = {
    "effective_batch_size": "Cells in a step of a task, on average",
    "padding_waste": "Part of the cells computed that is padding",
}


class EngineMetrics(Collector):
    """Collector that reads the engines' counters when asked.

    Args:
        models: those served now.
    """

    def __init__(self, models: Callable[[], Iterable[OipModel]]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each counter and gauge."""
        totals = [((each.spec.name, each.spec.version), each.engine.counters.to_dict()) for each in self._models()]
        for name, help_ in _COUNTERS.items():
            counter = CounterMetricFamily(f"mlsys_batchmaker_{name}", help_, labels=_LABELS)
            for labels, values in totals:
                counter.add_metric(labels, values[name])
            yield counter
        for name, help_ in _GAUGES.items():
            gauge = GaugeMetricFamily(f"mlsys_batchmaker_{name}", help_, labels=_LABELS)
            for labels, values in totals:
                gauge.add_metric(labels, values[name])
            yield gauge


_STREAM_COUNTERS = {
    "frames": "Frames of streams answered",
    "late": "Frames of streams answered after their deadline",
    "swapped_out": "States of streams moved to host memory",
    "swapped_in": "States of streams moved back from host memory",
}


class StreamMetrics(Collector):
    """Collector of the engines of streams.

    Args:
        streams: those served now.
    """

    def __init__(self, streams: Callable[[], Iterable[OipStream]]) -> None:
        self._streams = streams

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each counter, and the number of open streams."""
        found = [((each.spec.name, each.spec.version), each.engine) for each in self._streams()]
        for name, help_ in _STREAM_COUNTERS.items():
            counter = CounterMetricFamily(f"mlsys_batchmaker_stream_{name}", help_, labels=_LABELS)
            for labels, engine in found:
                counter.add_metric(labels, getattr(engine.counters, name))
            yield counter
        gauge = GaugeMetricFamily("mlsys_batchmaker_streams", "Open streams", labels=_LABELS)
        for labels, engine in found:
            gauge.add_metric(labels, len(engine))
        yield gauge
