"""Workloads: when requests arrive, and the latencies of a run.

An arrival process turns a random generator into arrival times in seconds. Arrivals and lengths make a trace
(:mod:`mlsys_bench.workload.trace`), which the load generator fires. A process is a frozen record of its parameters;
all randomness comes from the generator passed in. Poisson-like processes are unit-rate processes on a rescaled time
axis, so that with one seed a load sweep sends the same pattern, only faster (ORCA, section 6: the same trace, its
arrival times adjusted to the rate).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlsys_core.errors import InvalidInputError

Times: TypeAlias = NDArray[np.float64]  # [n] seconds from the start of the run, non-decreasing


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """Return the first ``n`` arrival times: float64 ``[n]``, seconds from the start, non-decreasing, 0 or more."""
        ...


def _unit_poisson(n: int, rng: np.random.Generator) -> Times:
    return np.cumsum(rng.exponential(size=n))


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean ``1 / rate`` seconds (ORCA 6, BatchMaker 7.1, DVABatch 8.1).

    Example:
        >>> Poisson(4.0).times(3, np.random.default_rng(0)).round(2).tolist()
        [0.17, 0.42, 0.43]
    """

    rate: float  # requests per second

    def __post_init__(self) -> None:
        require_positive("the arrival rate", self.rate)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        return _unit_poisson(n, rng) / self.rate


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """One arrival every ``1 / rate`` seconds, the first at 0; draws no random numbers.

    Example:
        >>> ConstantRate(2.0).times(3, np.random.default_rng()).tolist()
        [0.0, 0.5, 1.0]
    """

    rate: float  # requests per second

    def __post_init__(self) -> None:
        require_positive("the arrival rate", self.rate)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        return np.arange(n, dtype=np.float64) / self.rate


@dataclass(frozen=True, slots=True)
class Stepping:
    """Poisson arrivals whose rate changes in steps; after the last step the first follows again (DVABatch, 8.3).

    A rate of 0 is a pause. The mean rate is ``sum(duration * rate) / sum(duration)``.

    Example:
        >>> times = Stepping(((10.0, 0.0), (10.0, 5.0))).times(20, np.random.default_rng(0))
        >>> bool(times[0] > 10.0)
        True
    """

    steps: tuple[tuple[float, float], ...]  # (duration in seconds, rate in requests per second), in order

    def __post_init__(self) -> None:
        for duration_s, rate in self.steps:
            require_positive("the duration of a step", duration_s)
            require_not_negative("the rate of a step", rate)
        if not any(rate > 0 for _, rate in self.steps):
            raise InvalidInputError(f"no step of {self.steps!r} has a rate above 0: nothing would ever arrive")

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        durations_s, rates = np.asarray(self.steps, dtype=np.float64).T
        starts_s = np.concatenate([[0.0], np.cumsum(durations_s)])
        # Expected arrivals at each step's start. Inverting this function maps a unit-rate process onto the stepped one.
        expected = np.concatenate([[0.0], np.cumsum(durations_s * rates)])
        cycle, within = np.divmod(_unit_poisson(n, rng), expected[-1])
        step = np.searchsorted(expected, within, side="right") - 1  # 'right': a pause has no width and is passed over
        return np.asarray(cycle * starts_s[-1] + starts_s[step] + (within - expected[step]) / rates[step])


@dataclass(frozen=True, slots=True)
class Bursty:
    """Gamma-distributed gaps of mean ``1 / rate``, so the mean rate is kept whatever the burstiness.

    ``burstiness`` is the gaps' coefficient of variation (standard deviation over mean): 1 is Poisson, above 1 arrivals
    come in bursts, towards 0 they become regular.

    Example:
        >>> gaps = np.diff(Bursty(10.0, burstiness=3.0).times(20_000, np.random.default_rng(0)))
        >>> round(float(gaps.std() / gaps.mean()))
        3
    """

    rate: float  # requests per second
    burstiness: float  # coefficient of variation of the gaps

    def __post_init__(self) -> None:
        require_positive("the arrival rate", self.rate)
        require_positive("the burstiness", self.burstiness)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        squared_cv = self.burstiness**2
        return np.cumsum(rng.gamma(1.0 / squared_cv, squared_cv, size=n)) / self.rate


@dataclass(frozen=True, slots=True)
class OnOff:
    """Markov-modulated Poisson: exponential on-periods with arrivals alternate with exponential silent off-periods.

    Within an on-period the rate is ``rate * (mean_on_s + mean_off_s) / mean_on_s``, and the process starts in its
    stationary state, so the mean rate is ``rate`` over any window.

    Example:
        >>> OnOff(5.0, mean_on_s=1.0, mean_off_s=4.0).on_rate
        25.0
    """

    rate: float  # requests per second, on average
    mean_on_s: float
    mean_off_s: float

    def __post_init__(self) -> None:
        require_positive("the arrival rate", self.rate)
        require_positive("the mean on-period", self.mean_on_s)
        require_positive("the mean off-period", self.mean_off_s)

    @property
    def on_rate(self) -> float:
        """Requests per second while on."""
        return self.rate * (self.mean_on_s + self.mean_off_s) / self.mean_on_s

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        on_time_s = _unit_poisson(n, rng) / self.on_rate  # the arrivals on a clock that stops while off
        needed_s = float(on_time_s[-1]) if n else 0.0
        starts_on = rng.random() < self.mean_on_s / (self.mean_on_s + self.mean_off_s)
        off_s = [0.0 if starts_on else rng.exponential(self.mean_off_s)]  # silence before on-period i
        on_ends_s = [rng.exponential(self.mean_on_s)]
        while on_ends_s[-1] <= needed_s:
            off_s.append(rng.exponential(self.mean_off_s))
            on_ends_s.append(on_ends_s[-1] + rng.exponential(self.mean_on_s))
        period = np.searchsorted(on_ends_s, on_time_s, side="right")
        return np.asarray(on_time_s + np.cumsum(off_s)[period])


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request ``think_time_s`` after its last one ended.

    Sending times depend on the server, so all times are 0 ("as soon as a client is free") and the load generator
    takes this record as its mode.

    Example:
        >>> ClosedLoop(8).times(2, np.random.default_rng()).tolist()
        [0.0, 0.0]
    """

    concurrency: int
    think_time_s: float = 0.0

    def __post_init__(self) -> None:
        require_count("the concurrency", self.concurrency)
        require_not_negative("the think time", self.think_time_s)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`."""
        return np.zeros(n, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Replay:
    """Arrival times recorded elsewhere, played ``speed`` times as fast.

    Example:
        >>> Replay((0.0, 1.0, 4.0), speed=2.0).times(3, np.random.default_rng()).tolist()
        [0.0, 0.5, 2.0]
    """

    recorded_s: Sequence[float] = field(repr=False)  # seconds, non-decreasing
    speed: float = 1.0

    def __post_init__(self) -> None:
        require_positive("the replay speed", self.speed)
        recorded_s = np.asarray(self.recorded_s, dtype=np.float64)
        if recorded_s.ndim != 1 or not np.isfinite(recorded_s).all() or (recorded_s < 0).any():
            raise InvalidInputError("replayed arrival times must be one list of finite seconds, none below 0")
        if (np.diff(recorded_s) < 0).any():
            position = int(np.argmax(np.diff(recorded_s) < 0)) + 1
            raise InvalidInputError(
                f"replayed arrival time {position} lies before the one ahead of it: sort them first"
            )

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """See :meth:`Arrivals.times`.

        Raises:
            InvalidInputError: more times are asked for than were recorded.
        """
        if n > len(self.recorded_s):
            raise InvalidInputError(f"{n} arrivals asked for, {len(self.recorded_s)} recorded: ask for at most those")
        return np.asarray(self.recorded_s[:n], dtype=np.float64) / self.speed


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """A distribution of durations in seconds (percentiles interpolate linearly)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, durations_s: Iterable[float | None]) -> LatencySummary | None:
        """Return the summary of the durations that are not None; None if there are none.

        Example:
            >>> LatencySummary.of([0.1, None, 0.3]).mean
            0.2
        """
        values = np.asarray([value for value in durations_s if value is not None], dtype=np.float64)
        if values.size == 0:
            return None
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(values.size, float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One run as a point of a load curve (see :mod:`mlsys_core.plot`)."""

    offered_rps: float | None  # arrivals per second; None in a closed loop, where the server sets them
    throughput_rps: float  # successful requests per second
    latency: LatencySummary
    normalized_latency: LatencySummary | None = None  # per output token; None if token counts are unknown


def require_positive(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number above zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number above 0")


def require_not_negative(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number of at least zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number of at least 0")


def require_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise InvalidInputError(f"{name} is {value!r}: give a whole number of at least {minimum}")
