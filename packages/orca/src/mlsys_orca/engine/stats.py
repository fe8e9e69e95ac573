"""Times and token counts of an engine's requests, as ``/metrics`` shows them: waiting, running, whole.

Noted where a front reads its tokens, in the event loop's thread and never in the engine's, but for the moment at which
a request first runs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from mlsys_serving.tracing import EngineTraces

if TYPE_CHECKING:
    from mlsys_orca.scheduling.batch import IterationBatch

# Seconds, as in vLLM's histograms.
_LATENCIES = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """Histogram: counts by upper bound; one list index per observation.

    Example:
        >>> histogram = Histogram((1.0, 2.0))
        >>> for value in (0.5, 1.5, 9.0):
        ...     histogram.observe(value)
        >>> histogram.buckets(), histogram.sum
        ([('1.0', 1), ('2.0', 2), ('+Inf', 3)], 11.0)
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """Return (upper bound, values up to it), as Prometheus has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class EngineStats:
    """Times and counts of one engine's requests."""

    def __init__(self) -> None:
        self.queue = Histogram(_LATENCIES)  # from submission to the first iteration
        self.first_token = Histogram(_LATENCIES)  # from submission
        self.between_tokens = Histogram(_BETWEEN)
        self.whole = Histogram(_WHOLE)  # from submission to the end
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0
        self.finished: Counter[str] = Counter()  # by reason: stop, length, abort, error
        self.model = ""  # its name, for traces
        self.traces = EngineTraces(_members)
        self._submitted_s: dict[str, float] = {}  # of requests that have not run yet

    def submitted(self, request_id: str, num_prompt_tokens: int) -> float:
        """Note that a request was accepted; return the time, in seconds of the performance counter."""
        now = time.perf_counter()
        self._submitted_s[request_id] = now
        self.num_prompt_tokens += num_prompt_tokens
        return now

    def placed(self, request_id: str) -> None:
        """Note that a request is about to run for the first time. Called in the engine's thread."""
        submitted_s = self._submitted_s.pop(request_id, None)
        if submitted_s is not None:
            self.queue.observe(time.perf_counter() - submitted_s)

    def ended(self, request_id: str, reason: str, submitted_s: float) -> None:
        """Note that a request has left."""
        self._submitted_s.pop(request_id, None)
        self.finished[reason] += 1
        self.whole.observe(time.perf_counter() - submitted_s)


def _members(batch: IterationBatch) -> list[str]:
    return [part.request_id for part in batch.requests]
