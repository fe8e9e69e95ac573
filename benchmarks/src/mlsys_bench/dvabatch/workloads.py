"""Lengths and arrivals of the benchmarks (DVABatch, section 8.1; Figure 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mlsys_core.loop import ServeRequest
from mlsys_core.workload import Poisson

from mlsys_bench.dvabatch.lengths import LIKE


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


def stepping_trace(
    rates: Sequence[float], num_per_step: int, workload: str | None = None
) -> list[tuple[float, ServeRequest[Any]]]:
    """Return ``num_per_step`` requests at each of ``rates`` per second, one step after another (Figure 15).

    Their lengths are like those of ``workload``; None: all are 1.
    """
    trace: list[tuple[float, ServeRequest[Any]]] = []
    for step, rate in enumerate(rates):
        begin = trace[-1][0] if trace else 0.0
        lengths = [1] * num_per_step if workload is None else lengths_like(workload, num_per_step, seed=step)
        for at, request in poisson_trace(rate, lengths, lambda _: None, seed=step):
            trace.append((begin + at, replace(request, request_id=str(len(trace)))))
    return trace


def backlog(lengths: list[int], payload: Callable[[int], Any]) -> list[tuple[float, ServeRequest[Any]]]:
    """Return requests that all arrive at once; the throughput on them is the peak throughput."""
    return [(0.0, ServeRequest(str(number), payload(length), length=length)) for number, length in enumerate(lengths)]
