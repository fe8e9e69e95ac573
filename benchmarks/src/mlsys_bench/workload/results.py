"""Result of a run of the load generator: one record per request, and the figures drawn from them.

Times are seconds from the start of the run. Latency counts from the moment a request was *due*, not from when it was
sent: a generator or a connection limit that delays requests must not flatter the server ("coordinated omission").
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
from mlsys_core.workload import LatencySummary, LoadPoint, require_positive

from mlsys_bench.workload.arrivals import ClosedLoop
from mlsys_bench.workload.files import read_text, write_text

CANCELLED = "cancelled"  # the error kind of requests that the generator itself ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from due to done."""

    index: int  # position in the trace; warm-up requests count down from -1
    scheduled_s: float  # when it was due (closed loop: when its client became free)
    sent_s: float  # when it was handed to the target
    done_s: float  # when it ended, well or not
    token_s: tuple[float, ...] = ()  # when each token, or chunk of tokens, came; empty if the answer was not streamed
    num_input_tokens: int  # the server's count, else the trace's
    num_output_tokens: int | None  # the server's count, else len(token_s); None if neither is known
    num_planned_tokens: int  # output tokens the trace asks for
    http_status: int | None = None  # also None if the request was cut off before its target could tell
    error: str | None = None  # kind; None: it succeeded
    detail: str = ""  # of the error, in words
    waited_for_connection: bool = False  # all allowed connections were taken when it was due
    output: str | None = None  # the answer, where the target keeps it

    @property
    def ok(self) -> bool:
        """True if the request succeeded."""
        return self.error is None

    @property
    def lateness_s(self) -> float:
        """Delay from due to sent, in seconds."""
        return self.sent_s - self.scheduled_s

    @property
    def latency_s(self) -> float:
        """End-to-end latency from due to done, in seconds."""
        return self.done_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token from due, in seconds; None if nothing was streamed."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def mean_itl_s(self) -> float | None:
        """Mean time between this request's tokens, in seconds; None below two tokens or without a stream."""
        if not self.token_s or not self.num_output_tokens or self.num_output_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output_tokens - 1)

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency over output tokens (ORCA, section 6.2); None if their number is 0 or unknown."""
        return self.latency_s / self.num_output_tokens if self.num_output_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBounds:
    """Bounds that a good request meets; None: no bound. At least one is needed."""

    latency_s: float | None = None  # end to end
    ttft_s: float | None = None
    itl_s: float | None = None  # the request's mean time between tokens; one token alone meets any bound
    normalized_latency_s: float | None = None

    def __post_init__(self) -> None:
        bounds = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if all(bound is None for bound in bounds.values()):
            raise InvalidInputError(f"goodput needs a bound: give one of {', '.join(bounds)}")
        for name, bound in bounds.items():
            if bound is not None:
                require_positive(f"the bound on {name}", bound)

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether ``record`` succeeded within every bound; a bounded figure that it lacks is not met."""

        def within(value: float | None, bound: float | None) -> bool:
            return bound is None or (value is not None and value <= bound)

        itl_s = 0.0 if len(record.token_s) == 1 and record.mean_itl_s is None else record.mean_itl_s
        return (
            record.ok
            and within(record.latency_s, self.latency_s)
            and within(record.ttft_s, self.ttft_s)
            and within(itl_s, self.itl_s)
            and within(record.normalized_latency_s, self.normalized_latency_s)
        )


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
