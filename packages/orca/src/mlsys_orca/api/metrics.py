"""Metrics of an engine at ``/metrics``; the HTTP base adds its own. Read when asked for: serving pays nothing.

Named as vLLM's metrics, behind this project's prefix: ``mlsys_orca_num_requests_running`` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from mlsys_orca.engine.client import EngineClient
    from mlsys_orca.engine.streams import Histogram

_PREFIX = "mlsys_orca_"


class EngineMetrics(Collector):
    """Gauges and counters of one engine, labelled with its scheduling policy.

    What only a :class:`~mlsys_orca.scheduling.request_pool.RequestPool` knows (who runs and who waits, preemptions,
    cached tokens) is left out for a policy that keeps none as ``pool``.

    Example:
        >>> CollectorRegistry().register(EngineMetrics(engine))  # doctest: +SKIP
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Collect the current values of all metrics."""
        engine, tables = self._engine, self._engine.counts()
        pool = tables.pool
        yield self._gauge("num_requests_unfinished", "Requests accepted that have not left", engine.num_unfinished)
        yield self._gauge("kv_blocks", "K/V blocks there are", tables.num_blocks)
        yield self._gauge("kv_blocks_used", "K/V blocks that requests hold", tables.num_blocks - tables.num_free_blocks)
        used = 1 - tables.num_free_blocks / tables.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the K/V blocks that requests hold, 0 to 1", used)
        config = engine.config
        yield self._gauge("tensor_parallel_size", "Processes that share each layer", config.tensor_parallel)
        yield self._gauge("pipeline_parallel_size", "Stages of the layers", config.pipeline_parallel)
        yield from self._times()
        if (recoveries := engine.recoveries) is not None:
            yield self._counter("worker_deaths", "Worker processes that died while they served", recoveries.num_deaths)
            yield self._counter("requests_resumed", "Requests that went on at another worker", recoveries.num_resumed)
            yield self._counter(
                "recomputed_tokens", "Tokens whose keys and values died with a worker", recoveries.num_recomputed_tokens
            )
            yield self._counter("poisoned_requests", "Requests that ended workers", recoveries.num_poisoned)
            yield self._gauge(
                "longest_stall_seconds",
                "From a death to a request's next token, at most so far",
                recoveries.longest_stall_s,
            )
        if pool is None:
            return
        num_running, num_admitted = pool.num_running, pool.num_unfinished
        yield self._gauge("num_requests_running", "Requests that hold K/V blocks", num_running)
        yield self._gauge(
            "num_requests_waiting", "Requests admitted that hold no K/V block", max(0, num_admitted - num_running)
        )
        yield self._counter("num_preemptions", "Requests that lost their K/V blocks to others", pool.num_preemptions)
        yield self._counter(
            "prefix_cache_hits", "Tokens whose keys and values were found in kept blocks", pool.num_cached_tokens
        )
        yield self._counter("spec_decode_num_draft_tokens", "Tokens guessed", pool.num_guessed)
        yield self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that stayed", pool.num_right)

    def _times(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield self._counter("prompt_tokens", "Tokens of the prompts accepted", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.num_new_tokens)
        ended = CounterMetricFamily(
            _PREFIX + "request_success", "Requests that ended, by reason", labels=["policy", "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([self._engine.config.policy, reason], stats.finished[reason])
        yield ended
        yield self._histogram("request_queue_time_seconds", "From submission to the first iteration", stats.queue)
        yield self._histogram("time_to_first_token_seconds", "From submission", stats.first_token)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of a request", stats.between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "From submission to the end", stats.whole)

    def _histogram(self, name: str, help_: str, values: Histogram) -> Metric:
        metric = HistogramMetricFamily(_PREFIX + name, help_, labels=["policy"])
        metric.add_metric([self._engine.config.policy], buckets=values.buckets(), sum_value=values.sum)
        return metric

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        metric = GaugeMetricFamily(_PREFIX + name, help_, labels=["policy"])
        metric.add_metric([self._engine.config.policy], value)
        return metric

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        metric = CounterMetricFamily(_PREFIX + name, help_, labels=["policy"])
        metric.add_metric([self._engine.config.policy], value)
        return metric
