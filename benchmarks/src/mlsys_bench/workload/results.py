"""Result of a run of the load generator: one record per request, and the figures drawn from them.

Written by :mod:`mlsys_bench.workload.loadgen`, read by the tables, the plots and the benchmarks.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_core.workload.arrivals import ClosedLoop

from mlsys_bench.workload.files import read_text, write_text
from mlsys_bench.workload.records import CANCELLED, LatencyBounds, RequestRecord

FORMAT = "mlsys-load-result"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Goodput:
    """Share and rate of the requests of a run that met its bounds."""

    num_good: int
    share: float  # of the requests that ended by themselves: failures count as not good, cancelled ones not at all
    rps: float  # good requests per second


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All records of one run, in trace order, and the settings of the run."""

    name: str  # of the system or run, for tables and legends
    records: tuple[RequestRecord, ...]
    num_planned: int  # requests in the trace; more than there are records if the run was interrupted
    max_connections: int  # requests that may be outstanding at once
    closed_loop: ClosedLoop | None = None  # None: open loop
    interrupted: bool = False
    warmup: tuple[RequestRecord, ...] = ()  # sent before the run, in none of the figures
    environment: Mapping[str, Any] = field(default_factory=dict)  # where it ran, as the caller describes it
    made_by: Mapping[str, Any] = field(default_factory=dict)  # recipe of the trace

    @property
    def successes(self) -> tuple[RequestRecord, ...]:
        """The records without error."""
        return tuple(record for record in self.records if record.ok)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request's due time to the end of the last; 0 if there is none."""
        if not self.records:
            return 0.0
        return max(record.done_s for record in self.records) - min(record.scheduled_s for record in self.records)

    @property
    def offered_rps(self) -> float | None:
        """Arrivals per second of the open loop; None in a closed loop or below two arrivals."""
        due_s = [record.scheduled_s for record in self.records]
        if self.closed_loop is not None or len(due_s) < 2 or max(due_s) == min(due_s):
            return None
        return (len(due_s) - 1) / (max(due_s) - min(due_s))

    @property
    def throughput_rps(self) -> float:
        """Successful requests per second."""
        return self._per_second(len(self.successes))

    @property
    def throughput_tokens_per_s(self) -> float:
        """Output tokens of successful requests per second."""
        return self._per_second(sum(record.num_output_tokens or 0 for record in self.successes))

    def _per_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def latency(self) -> LatencySummary | None:
        """End-to-end latency of the successes."""
        return LatencySummary.of(record.latency_s for record in self.successes)

    @property
    def ttft(self) -> LatencySummary | None:
        """Time to first token of the successes."""
        return LatencySummary.of(record.ttft_s for record in self.successes)

    @property
    def itl(self) -> LatencySummary | None:
        """Inter-token latency: every gap between neighbouring chunks of every success, pooled."""
        return LatencySummary.of(gap for record in self.successes for gap in np.diff(record.token_s).tolist())

    @property
    def normalized_latency(self) -> LatencySummary | None:
        """Latency per output token of the successes."""
        return LatencySummary.of(record.normalized_latency_s for record in self.successes)

    @property
    def lateness(self) -> LatencySummary | None:
        """Lateness of the generator itself, over requests that did not have to wait for a connection."""
        return LatencySummary.of(record.lateness_s for record in self.records if not record.waited_for_connection)

    @property
    def errors(self) -> dict[str, int]:
        """Number of failed requests by kind, most frequent first."""
        return dict(Counter(record.error for record in self.records if record.error is not None).most_common())

    @property
    def num_generator_limited(self) -> int:
        """Requests that were due while all allowed connections were taken."""
        return sum(record.waited_for_connection for record in self.records)

    def goodput(self, bounds: LatencyBounds) -> Goodput:
        """Return the share and rate of the requests that met ``bounds``."""
        num_good = sum(bounds.met_by(record) for record in self.records)
        num_ended = sum(record.error != CANCELLED for record in self.records)
        return Goodput(num_good, num_good / num_ended if num_ended else 0.0, self._per_second(num_good))

    def between(self, start_s: float, end_s: float) -> LoadResult:
        """Return the part of the run that was due in ``[start_s, end_s)``, e.g. one step of a stepping load."""
        kept = tuple(record for record in self.records if start_s <= record.scheduled_s < end_s)
        return dataclasses.replace(self, records=kept, num_planned=len(kept))

    def point(self) -> LoadPoint:
        """Return this run as a point of a curve.

        Raises:
            InvalidInputError: no request succeeded.
        """
        latency = self.latency
        if latency is None:
            raise InvalidInputError(f"run {self.name!r} has no successful request to plot; errors: {self.errors}")
        return LoadPoint(
            offered_rps=self.offered_rps,
            throughput_rps=self.throughput_rps,
            latency=latency,
            normalized_latency=self.normalized_latency,
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON values; durations in seconds."""
        distributions = {
            name: None if (value := getattr(self, name)) is None else dataclasses.asdict(value)
            for name in ("latency", "ttft", "itl", "normalized_latency", "lateness")
        }
        return {
            "num_planned": self.num_planned,
            "num_sent": len(self.records),
            "num_succeeded": len(self.successes),
            "errors": self.errors,
            "num_generator_limited": self.num_generator_limited,
            "duration_s": self.duration_s,
            "offered_rps": self.offered_rps,
            "throughput_rps": self.throughput_rps,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            **distributions,
        }

    def save(self, path: Path) -> None:
        """Write everything, and the summary, to ``path`` as JSON.

        Raises:
            InvalidInputError: the file cannot be written, or ``environment`` or ``made_by`` hold no JSON values.
        """
        document = {
            "format": FORMAT,
            "version": VERSION,
            "summary": self.summary(),
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(self)},
        }
        try:
            text = json.dumps(document, default=dataclasses.asdict, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"the result holds something that JSON cannot: {error}") from error
        write_text(path, text + "\n", "the result")


def load_result(path: Path) -> LoadResult:
    """Return the result that :meth:`LoadResult.save` wrote to ``path``.

    Raises:
        InvalidInputError: the file cannot be read, or is not such a result.
    """
    from pydantic import TypeAdapter, ValidationError  # here: only reading back needs it

    try:
        document = json.loads(read_text(path, "a result"))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInputError(f'{path} is no {FORMAT} file; write one with "mlsys workload run TRACE --output FILE"')
    if document.get("version") != VERSION:
        raise InvalidInputError(f"{path} has version {document.get('version')!r}: this mlsys reads {VERSION}")
    try:
        return TypeAdapter(LoadResult).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{path} is malformed at {where or 'the top'}: {first['msg']}") from error
