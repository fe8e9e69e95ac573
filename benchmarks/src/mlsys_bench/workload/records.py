"""One request of a run: its timestamps, its end, and the figures and bounds that apply to it alone.

The load generator makes the records, :mod:`mlsys_bench.workload.results` sums them up. Times are seconds from the start
of the run. Latency counts from the moment a request was *due*, not from when it was sent: a generator or a connection
limit that delays requests must not flatter the server ("coordinated omission").
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload._validate import require_positive

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
