"""Statistics of one version's answers and their times; ``/stats``, ``ModelStatistics`` and ``/metrics`` read them.

Written in the event loop's thread only; a reader elsewhere sees each number right, though not all of one moment.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

from mlsys_serving.models.model import BatchCounts, CountsExecutions, Executions, Model, Timing

# Seconds: from a cache hit to a long generation.
BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
)


class FailureReason(Enum):
    """Why a request failed, in Triton's words."""

    REJECTED = "REJECTED"  # no room, not ready, or its deadline passed
    CANCELED = "CANCELED"  # the client left, or the server cut it
    BACKEND = "BACKEND"  # the model failed
    OTHER = "OTHER"  # the request was wrong


class Duration:
    """Count of an operation, and its total time."""

    __slots__ = ("count", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Add one operation."""
        self.count += 1
        self.total_s += seconds


class Histogram:
    """Counts by bucket, as Prometheus has them; summed up only on reading.

    Example:
        >>> histogram = Histogram()
        >>> histogram.add(0.0002)
        >>> histogram.cumulative()[:3]
        [('0.0001', 0), ('0.00025', 1), ('0.0005', 1)]
    """

    __slots__ = ("_counts", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the upper bound of each bucket, as text, and the number of values not above it."""
        bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
        sums: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            sums.append((bound, total))
        return sums


class VersionStatistics:
    """The counts of one version since it was loaded.

    Args:
        model: asked for its own :class:`.Executions`, if it counts them.
    """

    def __init__(self, model: Model) -> None:
        self._counts_executions = isinstance(model, CountsExecutions)
        self._executions = model.executions if isinstance(model, CountsExecutions) else Executions()
        self.success, self.failure = Duration(), Duration()  # requests, from their decoding to their response
        self.failures = dict.fromkeys(FailureReason, 0)
        self.queue, self.compute_input = Duration(), Duration()  # of successful requests, from here on
        self.compute_infer, self.compute_output = Duration(), Duration()
        self.queue_histogram, self.compute_histogram = Histogram(), Histogram()
        self.first_response_histogram = Histogram()  # of streams
        self.num_rows = 0
        self.last_inference_ms = 0  # since the epoch

    def executions(self) -> list[BatchCounts]:
        """Return the model's executions by batch size; one a request if the model does not count itself."""
        return self._executions.snapshot()

    @property
    def num_repeated(self) -> int:
        """Number of runs of requests whose earlier run ended with the model's process."""
        return self._executions.num_repeated

    def succeed(self, num_rows: int, duration_s: float, timing: Timing | None, *, now_ms: int) -> None:
        """Count a request that was answered."""
        if timing is None:
            timing = Timing(compute_infer_s=duration_s)
        self.success.add(duration_s)
        self.queue.add(timing.queue_s)
        self.compute_input.add(timing.compute_input_s)
        self.compute_infer.add(timing.compute_infer_s)
        self.compute_output.add(timing.compute_output_s)
        self.queue_histogram.add(timing.queue_s)
        self.compute_histogram.add(timing.compute_input_s + timing.compute_infer_s + timing.compute_output_s)
        self.num_rows += num_rows
        self.last_inference_ms = now_ms
        if not self._counts_executions:
            self._executions.record(
                num_rows,
                compute_input_s=timing.compute_input_s,
                compute_infer_s=timing.compute_infer_s,
                compute_output_s=timing.compute_output_s,
            )

    def fail(self, reason: FailureReason, duration_s: float) -> None:
        """Count a request that failed, or was given up."""
        self.failure.add(duration_s)
        self.failures[reason] += 1
