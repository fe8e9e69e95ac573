"""Length distributions: each turns a random generator into token counts of requests.

Beside the arrivals, the other half of a trace (:mod:`mlsys_bench.workload.trace`). The papers' own are at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import require_positive
from numpy.typing import NDArray

from mlsys_bench.workload.arrivals import require_count, require_not_negative
from mlsys_bench.workload.files import read_text

Counts: TypeAlias = NDArray[np.int64]  # [n] tokens, each at least 1

_Z99 = 2.3263478740408408  # the standard normal's 99th percentile


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """Return ``n`` independent draws: int64 ``[n]``, tokens, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``, both included, equally likely.

    Example:
        >>> sorted(set(Uniform(1, 3).sample(100, np.random.default_rng(0)).tolist()))
        [1, 2, 3]
    """

    low: int
    high: int  # included

    def __post_init__(self) -> None:
        require_count("the lower bound of a length", self.low)
        require_count("the upper bound of a length", self.high)
        if self.high < self.low:
            raise InvalidInputError(
                f"uniform lengths from {self.low} to {self.high}: the upper bound is the smaller one"
            )

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """See :meth:`Lengths.sample`."""
        return rng.integers(self.low, self.high, size=n, endpoint=True)


@dataclass(frozen=True, slots=True)
class Constant:
    """Always ``length`` tokens; draws no random numbers.

    Example:
        >>> Constant(24).sample(2, np.random.default_rng()).tolist()
        [24, 24]
    """

    length: int

    def __post_init__(self) -> None:
        require_count("the length", self.length)

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """See :meth:`Lengths.sample`."""
        return np.full(n, self.length, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """``exp(N(mu, sigma^2))`` rounded to whole tokens, then clipped to ``[low, high]`` (mass gathers at the bounds).

    Example:
        >>> LogNormal.from_mean_p99(24, 97, high=330)
        LogNormal(mu=2.927..., sigma=0.708..., low=1, high=330)
    """

    mu: float
    sigma: float
    low: int = 1
    high: int | None = None  # None: no bound

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu):
            raise InvalidInputError(f"mu is {self.mu!r}: give a finite number (the mean of the logarithm)")
        require_not_negative("sigma", self.sigma)
        require_count("the lower bound of a length", self.low)
        if self.high is not None:
            require_count("the upper bound of a length", self.high, minimum=self.low)

    @classmethod
    def from_mean_p99(cls, mean: float, p99: float, *, low: int = 1, high: int | None = None) -> LogNormal:
        """Return the log-normal with this mean and 99th percentile, before rounding and clipping.

        From ``mean = exp(mu + sigma^2 / 2)`` and ``p99 = exp(mu + z sigma)``; of the two solutions, the one with the
        smaller sigma (the other is nearly all tail: its median is below 7 % of its mean).

        Raises:
            InvalidInputError: ``p99`` is below ``mean``, or above ``exp(z^2 / 2)`` (14.97) times it.
        """
        require_positive("the mean length", mean)
        require_positive("the 99th percentile of the length", p99)
        discriminant = _Z99**2 - 2.0 * math.log(p99 / mean)
        if p99 < mean or discriminant < 0:
            bound = mean * math.exp(_Z99**2 / 2)
            raise InvalidInputError(
                f"no such log-normal: mean {mean:g} and p99 {p99:g}; give a p99 from {mean:g} to {bound:g}"
            )
        sigma = _Z99 - math.sqrt(discriminant)
        return cls(math.log(mean) - sigma**2 / 2, sigma, low=low, high=high)

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """See :meth:`Lengths.sample`."""
        highest = np.iinfo(np.int32).max if self.high is None else self.high
        drawn = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(drawn), self.low, highest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Draws with replacement from lengths observed elsewhere.

    Example:
        >>> set(Empirical((3, 5)).sample(50, np.random.default_rng(0)).tolist()) == {3, 5}
        True
    """

    observed: Sequence[int] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.observed) == 0:
            raise InvalidInputError("an empirical distribution needs at least one observed length, got none")
        for length in self.observed:
            require_count("an observed length", length)

    @classmethod
    def from_file(cls, path: Path) -> Empirical:
        """Read lengths from a file: a JSON list of integers, or one integer a line (blank and ``#`` lines ignored).

        Raises:
            InvalidInputError: the file cannot be read, or a line is not a whole number of at least 1.
        """
        text = read_text(path, "lengths")
        if text.lstrip().startswith("["):
            try:
                return cls(tuple(json.loads(text)))
            except json.JSONDecodeError as error:
                raise InvalidInputError(f"{path} starts like a JSON list but is none: {error}") from error
        observed = []
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.strip()
            if not entry or entry.startswith("#"):
                continue
            if not entry.isdecimal() or int(entry) < 1:
                raise InvalidInputError(f"{path}, line {number}: {entry!r} is not a whole number of at least 1")
            observed.append(int(entry))
        return cls(tuple(observed))

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """See :meth:`Lengths.sample`."""
        return rng.choice(np.asarray(self.observed, dtype=np.int64), size=n)


ORCA_PROMPTS = Uniform(32, 512)  # ORCA, section 6.2: input tokens
ORCA_OUTPUTS = Uniform(1, 128)  # ORCA, section 6.2: max_gen_tokens
WMT_SENTENCES = LogNormal.from_mean_p99(
    24, 97, high=330
)  # BatchMaker, section 7.1 and figure 10: WMT-15 sentence lengths
