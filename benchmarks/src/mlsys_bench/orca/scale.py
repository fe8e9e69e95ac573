"""Throughput and cost of a divided model: ``mlsys orca bench scale`` and ``mlsys orca bench gap``.

*Scale* runs the same requests through one process and through ranks and stages, in turn, and compares the answers.
*Control* is what an iteration takes beyond the computing of its stages, for each stage: from the master's step to its
results, on one iteration at a time. *Gap* is the time of the last stage's first rank between two iterations, with as
many iterations in flight as there are stages, and with one more, whose message waits at the worker.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from mlsys_core.report import Section
from mlsys_orca.model.slices import num_slices
from mlsys_orca.parallel.loading import load_head_only

from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.parallel import Contestant, engines, requests_of, run_round

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext


@dataclass(frozen=True, slots=True)
class Scale:
    """One engine of the comparison."""

    engine: str
    processes: int
    tokens_per_s: float
    ratio: float  # of the throughput to that of one process
    control_ms: float | None  # of an iteration beyond its stages' computing, for each stage; None: no messages
    control_bytes_per_token: float  # computed, over the control channel to the first stage
    states_bytes_per_token: float  # computed, over each channel between stages
    is_equal: bool  # its answers are those of one process


@dataclass(frozen=True, slots=True)
class Gap:
    """The last stage between two iterations."""

    engine: str
    iterations: int
    gap_ms: float  # median
    gap_p90_ms: float
    run_ms: float  # median time that the last stage computes
    message_was_waiting: float  # share of iterations whose message was there when the one before had ended
    tokens_per_s: float


def run(
    context: BenchContext, *, model: str, dtype: str | None = None, degrees: tuple[tuple[int, int], ...] = ()
) -> Section:
    """Return the section of the throughput by degrees; 'failed' if any answer differs."""
    path = resolve_model(model, settings().cache_dir)
    head = load_head_only(path, dtype=dtype)
    slices = num_slices(head.config)
    chosen = degrees or tuple(dict.fromkeys([(1, 2), (slices, 1), (slices, 2)]))
    rounds, answer = (3, 24) if context.is_quick else (7, 48)
    requests = requests_of(16, prompt=32, answer=answer)
    with engines(path, [(*pair, 0) for pair in chosen], dtype=dtype, one_with=context.num_threads) as contestants:
        for number in range(rounds + 1):
            for contestant in contestants:
                run_round(contestant, requests)
                if not number:
                    contestant.seconds.clear()  # warm-up
                    contestant.dones.clear()
        one, rows = contestants[0], []
        for contestant in contestants:
            control_ms, control_nbytes, is_equal = None, 0.0, contestant.answers == one.answers
            num_tokens = contestant.num_tokens
            if contestant is not one:
                control_nbytes = contestant.num_sent_nbytes / ((rounds + 1) * contestant.num_rows)
                control_ms = _control_ms(contestant)
            rows.append(
                Scale(
                    contestant.name,
                    contestant.ranks * contestant.stages,
                    num_tokens / contestant.median_s,
                    one.median_s / contestant.median_s,
                    control_ms,
                    control_nbytes,
                    4.0 * head.config.hidden_size if contestant.stages > 1 else 0.0,
                    is_equal,
                )
            )
    is_equal = all(row.is_equal for row in rows)
    text = (
        f"{len(requests)} requests of 32 and {answer} tokens, 8 in an iteration; {rounds} rounds in turn, medians; "
        "ranks have one thread each."
    )
    return rows_section("Orca: a divided model", rows, text, status="ok" if is_equal else "failed")


def _control_ms(contestant: Contestant) -> float:
    """Run single requests, so that one iteration is under way; return its time beyond computing, for each stage."""
    contestant.dones.clear()
    before = list(contestant.seconds)
    request = requests_of(1, prompt=4, answer=64)
    run_round(contestant, request)
    run_round(contestant, request)
    last = [done for done in contestant.dones if done.number >= contestant.dones[-1].number - 48]
    per_rank = [done for index, done in enumerate(last) if index % contestant.ranks == 0]
    idle_s = statistics.median(done.idle_s for done in per_rank)
    run_s = statistics.median(done.run_s for done in per_rank)
    contestant.seconds[:] = before
    # Between two of its iterations the last stage waits for the others' computing, about as long as its own.
    return 1e3 * max(0.0, idle_s - run_s * (contestant.stages - 1)) / contestant.stages


def run_gap(context: BenchContext, *, model: str, dtype: str | None = None, stages: int = 2) -> Section:
    """Return the section of the gaps between iterations."""
    path = resolve_model(model, settings().cache_dir)
    answer = 32 if context.is_quick else 96
    degrees = [(1, count, ahead) for count in dict.fromkeys((1, stages)) for ahead in (0, 1)]
    requests = requests_of(24, prompt=16, answer=answer)
    rows = []
    with engines(path, degrees, dtype=dtype, one_with=0) as contestants:
        for number in range(4):
            for contestant in contestants:
                run_round(contestant, requests, batch_size=4)
                if not number:
                    contestant.dones.clear()
                    contestant.seconds.clear()
        for contestant in contestants:
            gaps = sorted(1e3 * done.idle_s for done in contestant.dones)
            rows.append(
                Gap(
                    contestant.name,
                    len(gaps),
                    statistics.median(gaps),
                    gaps[int(0.9 * len(gaps))],
                    1e3 * statistics.median(done.run_s for done in contestant.dones),
                    statistics.fmean(done.was_waiting for done in contestant.dones),
                    contestant.num_tokens / contestant.median_s,
                )
            )
    text = f"24 requests of 16 and {answer} tokens, 4 in an iteration; three rounds in turn; one thread a rank."
    return rows_section("Orca: the gap between two iterations", rows, text)
