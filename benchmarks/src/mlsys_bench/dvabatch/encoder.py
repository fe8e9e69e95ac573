"""Input diversity on the real MiniLM: every batch of every case is run (Figures 14 and 16)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import MlsysError
from mlsys_core.report import Table
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.stages.profile import SHARERS, packed_units, profile_stages
from mlsys_dvabatch.stages.zoo import Loading, load
from mlsys_encoders.models.bert import BertStages

from mlsys_bench.dvabatch.cases import Case, Costed, Outcome, Timed, Trace, capped, delay_batch, run_case, zero_batch
from mlsys_bench.dvabatch.workloads import backlog, lengths_like, poisson_trace


class EncoderBench:
    """One encoder, padded and packed, with measured costs.

    Args:
        cache_dir: where models are found.
        is_quick: fewer sizes measured.
        name: of the encoder.
    """

    def __init__(self, cache_dir: Path, *, is_quick: bool, name: str = "all-minilm-l6-v2") -> None:
        loaded = load(name, cache_dir, Loading(num_stages=2))
        assert isinstance(loaded.model, BertStages)
        self.name = loaded.name
        self.padded = loaded.model
        self.packed = loaded.model.with_form(is_packed=True, num_stages=1)
        sizes, lengths = ((1, 2, 4, 16), (8, 32, 96, 256)) if is_quick else ((1, 2, 4, 8, 16, 32), loaded.lengths)
        self.costs: dict[bool, StageCosts] = {
            is_packed: profile_stages(
                model,
                loaded.request,
                batch_sizes=SHARERS if is_packed else sizes,
                lengths=packed_units(lengths) if is_packed else lengths,
                longest=lengths[-1],
                repeats=1 if is_quick else 3,
                clock=time.thread_time,
                is_packed=is_packed,
            )
            for is_packed, model in ((False, self.padded), (True, self.packed))
        }
        self._request = loaded.request

    def payload(self, length: int) -> Any:
        """Return the token ids of a request of ``length`` tokens."""
        return self._request(length)

    def tuned_window_s(self, trace: Trace, peak_rps: float) -> float:
        """Return DelayBatch's window with the lowest average latency on the measured costs, in seconds."""
        subject = Costed(self.costs[False])
        windows = [64 / peak_rps / divisor for divisor in (4, 16, 64, 256)]
        return min(windows, key=lambda window_s: run_case(delay_batch(window_s), subject, trace).mean_s)

    def run(self, case: Case, trace: Trace, *, offered_rps: float | None = None) -> Outcome:
        """Run one case on the real model."""
        is_packed = case.name.endswith("packed")
        model = self.packed if is_packed else self.padded
        subject = Timed(StageRunner(model), self.costs[is_packed])
        return run_case(case, subject, trace, offered_rps=offered_rps)


def cases(window_s: float) -> list[Case]:
    """Return the baselines and the policies for input diversity."""
    return [
        zero_batch(),
        delay_batch(window_s),
        *(capped(size) for size in (1, 4, 16)),
        *(replace(capped(size), name=f"at most {size}, packed") for size in (1, 16)),  # on the packed form's runtime
        Case("Policy I, literal", lambda: InputPolicy(mode="literal")),
        Case("Policy I, cost-aware", InputPolicy),
        Case("token-packed", PackedPolicy),
    ]


def check_equal(outcomes: list[Outcome], tolerance: float = 1e-4) -> None:
    """Check that all cases gave the same vectors.

    Raises:
        MlsysError: they did not, so no times are worth reporting.
    """
    first = outcomes[0]
    for outcome in outcomes[1:]:
        for name, expected in first.results.items():
            difference = float(np.abs(outcome.results[name] - expected).max())
            if not difference <= tolerance:
                raise MlsysError(f"{outcome.case} and {first.case} differ by {difference:g} in request {name}")


def peaks(bench: EncoderBench, workload: str, num: int) -> list[Outcome]:
    """Measure each case's requests per second with all requests waiting."""
    trace = backlog(lengths_like(workload, num), bench.payload)
    outcomes = [bench.run(case, trace) for case in cases(0.0)]
    check_equal(outcomes)
    return outcomes


def at_load(bench: EncoderBench, workload: str, num: int, *, load: float, peak_rps: float) -> list[Outcome]:
    """Measure each case's latencies at a share of a peak."""
    rate = load * peak_rps
    trace = poisson_trace(rate, lengths_like(workload, num), bench.payload)
    window_s = bench.tuned_window_s(trace, peak_rps)
    outcomes = [bench.run(case, trace, offered_rps=rate) for case in cases(window_s)]
    check_equal(outcomes)
    return outcomes


def peak_table(by_workload: dict[str, list[Outcome]]) -> Table:
    """Return a table of requests per second, and of their ratio to DelayBatch's."""
    names = [outcome.case for outcome in next(iter(by_workload.values()))]
    rows = []
    for workload, outcomes in by_workload.items():
        delay = next(outcome for outcome in outcomes if outcome.case == "DelayBatch").throughput_rps
        rows.append([workload, *(f"{o.throughput_rps:.1f} ({o.throughput_rps / delay:.2f}x)" for o in outcomes)])
    return Table(["lengths like", *names], rows, "Peak throughput, requests per second (over DelayBatch); Figure 17")
