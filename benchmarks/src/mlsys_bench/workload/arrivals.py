"""Arrival processes beside Poisson's (:class:`mlsys_core.workload.Poisson`).

A process turns a random generator into arrival times in seconds. Arrivals and lengths make a trace (:mod:`.trace`),
which the load generator fires. A process is a frozen record of its parameters; all randomness comes from the generator
passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol, TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import require_positive
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.float64]  # [n] seconds from the start of the run, non-decreasing


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """Return the first ``n`` arrival times: float64 ``[n]``, seconds from the start, non-decreasing, 0 or more."""
        ...


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
        cycle, within = np.divmod(np.cumsum(rng.exponential(size=n)), expected[-1])
        step = np.searchsorted(expected, within, side="right") - 1  # 'right': a pause has no width and is passed over
        return np.asarray(cycle * starts_s[-1] + starts_s[step] + (within - expected[step]) / rates[step])


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


def require_not_negative(name: str, value: float) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is a finite number of at least zero."""
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}: give a finite number of at least 0")


def require_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise ``InvalidInputError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise InvalidInputError(f"{name} is {value!r}: give a whole number of at least {minimum}")
