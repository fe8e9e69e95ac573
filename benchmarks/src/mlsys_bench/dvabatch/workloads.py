"""Lengths and arrivals of the benchmarks (DVABatch, section 8.1; Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.loop import ServeRequest
from mlsys_core.workload import Poisson


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts, cut at both ends."""

    median: float
    sigma: float  # of the logarithm
    least: int
    most: int
    mean: float | None  # tokens, as published; None: no set's

    def sample(self, num: int, seed: int = 0, most: int = 512) -> list[int]:
        """Draw the token counts of ``num`` requests, none above ``most``."""
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), self.sigma, num)
        return [int(length) for length in np.clip(np.round(drawn), self.least, min(self.most, most))]


# Published means: bytes of the training split (AX: the test split) without Arrow's columns, at 4.6 bytes a word piece
# (by hand: 4.4 of our documentation, 4.7 to 4.9 of papers), one mark at the front and one behind each text.
GLUE_LIKE: dict[str, Lengths] = {
    "CoLA": Lengths(10, 0.40, 3, 47, 11.0),
    "SST-2": Lengths(11, 0.75, 3, 66, 13.7),
    "MRPC": Lengths(53, 0.25, 20, 103, 54.7),
    "STS-B": Lengths(25, 0.50, 10, 125, 28.2),
    "QQP": Lengths(26, 0.45, 8, 330, 29.1),
    "MNLI": Lengths(36, 0.50, 5, 440, 40.1),
    "QNLI": Lengths(46, 0.50, 12, 512, 51.9),
    "RTE": Lengths(62, 0.55, 12, 290, 72.8),
    "WNLI": Lengths(32, 0.45, 13, 108, 35.5),
    "AX": Lengths(37, 0.65, 6, 240, 45.6),
}
# A few texts have most of the tokens, as documents among queries.
LIKE: dict[str, Lengths] = GLUE_LIKE | {"long-tailed": Lengths(24, 1.1, 3, 256, None)}


def lengths_like(workload: str, num: int, seed: int = 0, most: int = 512) -> list[int]:
    """Draw the token counts of ``num`` requests, like those of a name of :data:`.lengths.LIKE`."""
    return LIKE[workload].sample(num, seed, most)


def poisson_trace(
    rate: float, lengths: list[int], payload: Callable[[int], Any], seed: int = 0
) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests of these lengths that arrive at ``rate`` per second; with one seed only the rate differs."""
    times = Poisson(rate).times(len(lengths), np.random.default_rng(seed))
    return [
        (float(at), ServeRequest(str(number), payload(length), length=length))
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


def backlog(lengths: list[int], payload: Callable[[int], Any]) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests that all arrive at once; the throughput on them is the peak throughput."""
    return [(0.0, ServeRequest(str(number), payload(length), length=length)) for number, length in enumerate(lengths)]
