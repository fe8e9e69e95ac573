"""Length distributions: each turns a random generator into token counts of requests.

Beside the arrivals, the other half of a trace (:mod:`mlsys_bench.workload.trace`). The papers' own are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_bench.workload.arrivals import require_count

Counts: TypeAlias = NDArray[np.int64]  # [n] tokens, each at least 1


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
    """``exp(N(mu, sigma^2))`` rounded to whole tokens, then clipped to 1..``high`` (mass gathers at the bounds)."""

    mu: float  # mean of the logarithm
    sigma: float  # its standard deviation
    high: int

    def sample(self, n: int, rng: np.random.Generator) -> Counts:
        """See :meth:`Lengths.sample`."""
        drawn = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(drawn), 1, self.high).astype(np.int64)


ORCA_PROMPTS = Uniform(32, 512)  # ORCA, section 6.2: input tokens
ORCA_OUTPUTS = Uniform(1, 128)  # ORCA, section 6.2: max_gen_tokens
# BatchMaker, section 7.1 and figure 10: WMT-15 sentence lengths, mean 24, 99th percentile 97, at most 330.
# From mean = exp(mu + sigma^2 / 2) and p99 = exp(mu + 2.326 sigma); the solution with the smaller sigma.
WMT_SENTENCES = LogNormal(mu=2.92731907082284, sigma=0.7081451256982654, high=330)
