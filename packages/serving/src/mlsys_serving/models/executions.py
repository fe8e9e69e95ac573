"""Executions of a model by batch size, with their times: written by models, read by statistics and metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """All executions of one batch size."""

    batch_size: int  # rows
    count: int = 0
    compute_input_s: float = 0.0
    compute_infer_s: float = 0.0
    compute_output_s: float = 0.0


class Executions:
    """Counts of a model's executions; any thread may record, any may read.

    Example:
        >>> executions = Executions()
        >>> executions.record(8, compute_infer_s=0.25)
        >>> executions.record(8, compute_infer_s=0.25)
        >>> executions.snapshot()
        [BatchCounts(batch_size=8, count=2, compute_input_s=0.0, compute_infer_s=0.5, compute_output_s=0.0)]
    """

    def __init__(self) -> None:
        self.num_repeated = (
            0  # requests that ran again, since the process of the model died; see mlsys_serving.instances
        )
        self._lock = threading.Lock()
        self._counts: dict[int, list[float]] = {}  # batch size -> what follows it in BatchCounts

    def record(
        self,
        batch_size: int,
        *,
        compute_input_s: float = 0.0,
        compute_infer_s: float = 0.0,
        compute_output_s: float = 0.0,
    ) -> None:
        """Record one execution of ``batch_size`` rows, and its times in seconds."""
        self.add(BatchCounts(batch_size, 1, compute_input_s, compute_infer_s, compute_output_s))

    def add(self, counts: BatchCounts) -> None:
        """Add several executions of one batch size."""
        with self._lock:
            sums = self._counts.setdefault(counts.batch_size, [0, 0.0, 0.0, 0.0])
            sums[0] += counts.count
            sums[1] += counts.compute_input_s
            sums[2] += counts.compute_infer_s
            sums[3] += counts.compute_output_s

    def snapshot(self) -> list[BatchCounts]:
        """Return the counts, by ascending batch size."""
        with self._lock:
            return [
                BatchCounts(size, int(self._counts[size][0]), *self._counts[size][1:]) for size in sorted(self._counts)
            ]
