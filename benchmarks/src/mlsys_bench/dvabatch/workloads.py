"""Lengths and arrivals of the benchmarks (DVABatch, section 8.1; Figure 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mlsys_core.serving import ServeRequest
from mlsys_core.workload import Poisson

# Like the ten workloads of GLUE: lognormal token counts (median, sigma, least, most), after Figure 4 and the data's own
# descriptions. No GLUE data comes with this package.
GLUE_LIKE: dict[str, tuple[float, float, int, int]] = {
    "CoLA": (9, 0.40, 3, 47),
    "SST-2": (11, 0.75, 3, 66),
    "MRPC": (53, 0.25, 20, 103),
    "STS-B": (27, 0.50, 10, 125),
    "QQP": (28, 0.45, 8, 330),
    "MNLI": (36, 0.50, 5, 440),
    "QNLI": (46, 0.50, 12, 512),
    "RTE": (62, 0.55, 12, 290),
    "WNLI": (36, 0.45, 13, 108),
    "AX": (23, 0.65, 6, 121),
}
# A few texts have most of the tokens, as documents among queries.
LIKE = GLUE_LIKE | {"long-tailed": (24, 1.1, 3, 256)}


def lengths_like(workload: str, num: int, seed: int = 0, most: int = 512) -> list[int]:
    """Draw the token counts of ``num`` requests, log-normal like those of a name of :data:`LIKE`."""
    median, sigma, low, high = LIKE[workload]
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, num)
    return [int(length) for length in np.clip(np.round(drawn), low, min(high, most))]


def poisson_trace(
    rate: float, lengths: list[int], payload: Callable[[int], Any], seed: int = 0
) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests of these lengths that arrive at ``rate`` per second; with one seed only the rate differs."""
    times = Poisson(rate).times(len(lengths), np.random.default_rng(seed))
    return [
        (float(at), ServeRequest(str(number), payload(length), length=length))
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


def stepping_trace(rates: Sequence[float], num_per_step: int) -> list[tuple[float, ServeRequest[Any]]]:
    """Return ``num_per_step`` requests of length 1 at each of ``rates`` per second, one after another (Figure 15)."""
    trace: list[tuple[float, ServeRequest[Any]]] = []
    for step, rate in enumerate(rates):
        begin = trace[-1][0] if trace else 0.0
        for at, request in poisson_trace(rate, [1] * num_per_step, lambda _: None, seed=step):
            trace.append((begin + at, replace(request, request_id=str(len(trace)))))
    return trace


def backlog(lengths: list[int], payload: Callable[[int], Any]) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests that all arrive at once; the throughput on them is the peak throughput."""
    return [(0.0, ServeRequest(str(number), payload(length), length=length)) for number, length in enumerate(lengths)]
