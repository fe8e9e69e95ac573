"""Stepping load (DVABatch, section 8.3; Figures 15 and 17): the paper's requests per second, scaled to this machine.

The paper begins at 66 requests per second, raises the load every 2,000 requests, and has 4,000 per second after 30,000.
Here the last rate is :data:`BEYOND` times the highest that the model can serve, and the others follow in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlsys_bench.dvabatch.cases import Case, Subject, run_case
from mlsys_bench.dvabatch.workloads import stepping_trace

PAPER_RPS = tuple(66.0 + (4000.0 - 66.0) * step / 15 for step in range(16))  # evenly raised: the paper says "gradually"
QOS_S = 0.2  # the paper's latency target
BEYOND = 1.25  # last rate, as a part of the model's peak


@dataclass(frozen=True, slots=True)
class Stepping:
    """A run under a load that rises step by step."""

    rates: tuple[float, ...]  # requests per second of each step
    num_per_step: int
    latencies_s: tuple[float, ...]  # in order of arrival

    @property
    def by_step(self) -> NDArray[np.float64]:
        """Latencies in seconds, [steps, requests]."""
        return np.reshape(np.asarray(self.latencies_s), (len(self.rates), self.num_per_step))

    def highest_rps(self, qos_s: float) -> float:
        """Return the highest load, in requests per second, up to which 99 of 100 requests stay within ``qos_s``.

        Loads are tried in rising order; the search ends at the first that fails. 0: all fail.
        """
        too_long = np.flatnonzero(np.percentile(self.by_step, 99, axis=1) > qos_s)
        num_good = int(too_long[0]) if len(too_long) else len(self.rates)
        return self.rates[num_good - 1] if num_good else 0.0


def scaled_rates(peak_rps: float) -> tuple[float, ...]:
    """Return the paper's rates, scaled so that the last is :data:`BEYOND` times ``peak_rps``, requests per second."""
    return tuple(rate * BEYOND * peak_rps / PAPER_RPS[-1] for rate in PAPER_RPS)


def serve_rising(
    case: Case, subject: Subject, peak_rps: float, *, num_per_step: int, workload: str | None = None
) -> Stepping:
    """Serve a load that rises over :func:`scaled_rates`, in virtual time.

    Args:
        case: Policy that serves it.
        subject: Costs of the model's batches.
        peak_rps: Highest rate that the model can serve, requests per second.
        num_per_step: Requests at each rate.
        workload: Name of the set that requests' lengths are like; None: all have one shape.
    """
    rates = scaled_rates(peak_rps)
    outcome = run_case(case, subject, stepping_trace(rates, num_per_step, workload))
    return Stepping(rates, num_per_step, outcome.latencies_s)


def record(runs: Mapping[str, Stepping], qos_s: float) -> dict[str, object]:
    """Return runs of the same rates as plain data for a results file: latencies of each step and the highest load.

    Args:
        runs: Run of each case, by its name.
        qos_s: Latency target in seconds.
    """
    one = next(iter(runs.values()))
    scale = one.rates[-1] / PAPER_RPS[-1]
    return {
        "qos_s": qos_s,
        "scale": scale,
        "num_per_step": one.num_per_step,
        "paper_rps": list(PAPER_RPS),
        "rates_rps": list(one.rates),
        "cases": {
            name: {
                "mean_s": run.by_step.mean(axis=1).tolist(),
                "p99_s": np.percentile(run.by_step, 99, axis=1).tolist(),
                "highest_rps": run.highest_rps(qos_s),
                "highest_paper_rps": run.highest_rps(qos_s) / scale,
            }
            for name, run in runs.items()
        },
    }
