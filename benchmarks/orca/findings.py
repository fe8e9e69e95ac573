"""Turn runs into rows: problems of a run, the best settings, medians over repetitions, the table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contestants import Settings
from mlsys_core.report import Table
from mlsys_core.workload import LatencySummary, LoadResult

COLUMNS = (
    "traffic",
    "contestant",
    "tokens/s",
    "req/s",
    "TTFT ms, p50",
    "p99",
    "ms/token, p50",
    "p99",
    "as ours",
    "foreign",
    "",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant under one traffic, once."""

    contestant: str
    traffic: str
    result: LoadResult
    foreign: float  # share of the machine that others took, 0 to 1
    problems: tuple[str, ...]  # why its figures cannot be compared; empty: they can

    def to_json(self) -> dict[str, Any]:
        """Return its figures as JSON values, without the single requests."""
        return {
            "case": self.contestant,
            "traffic": self.traffic,
            "foreign": self.foreign,
            "problems": list(self.problems),
            **self.result.summary(),
        }


def problems_of(result: LoadResult, num_input_tokens: Sequence[int]) -> tuple[str, ...]:
    """Return the reasons why ``result`` cannot be compared: failures, and wrong token counts.

    Args:
        result: Of a run.
        num_input_tokens: Of each prompt, as it was sent.
    """
    problems = [f"{count} failed: {kind}" for kind, count in result.errors.items()]
    wrong = {
        "answers": sum(record.num_output_tokens != record.num_planned_tokens for record in result.successes),
        "prompts": sum(record.num_input_tokens != num_input_tokens[record.index] for record in result.successes),
    }
    problems += [f"{count} {what} of another length than asked for" for what, count in wrong.items() if count]
    return tuple(problems)


def score_of(run: Run, *, is_offline: bool) -> float:
    """Return the score that tuning maximises.

    Output tokens per second, or online the inverse median normalised latency.

    A run with problems scores 0.
    """
    if run.problems:
        return 0.0
    if is_offline:
        return run.result.throughput_tokens_per_s
    normalized = run.result.normalized_latency
    return 0.0 if normalized is None else 1.0 / normalized.p50


def best_settings(tried: Sequence[tuple[Settings, float]]) -> Settings | None:
    """Return the settings with the largest score, the first of equals; None if none scored above 0.

    Example:
        >>> best_settings([({"size": 32}, 2.0), ({"size": 64}, 3.0), ({"size": 96}, 3.0)])
        {'size': 64}
    """
    best, score = max(tried, key=lambda pair: pair[1], default=({}, 0.0))
    return best if score > 0 else None


def agreement(ours: LoadResult, theirs: LoadResult) -> float:
    """Return the share of requests with the same whole text, as tokens and texts are one to one."""
    expected = {record.index: record.output for record in ours.successes}
    same = [expected.get(record.index) == record.output for record in theirs.successes]
    return sum(same) / len(expected) if expected else 0.0


def table(runs: Sequence[Run], *, ours: str, caption: str) -> Table:
    """Return a row for each traffic and contestant, in order of their first run: medians over repetitions.

    ``as ours`` compares the answers of each with those of contestant ``ours``; ``foreign`` is the largest share.
    """
    traffics, contestants = ([*dict.fromkeys(getattr(run, key) for run in runs)] for key in ("traffic", "contestant"))
    rows = []
    for traffic in traffics:
        groups = {
            name: [run for run in runs if (run.traffic, run.contestant) == (traffic, name)] for name in contestants
        }
        for name, group in groups.items():
            if group:
                rows.append([traffic, name, *_cells(group, groups.get(ours, ()))])
    return Table(COLUMNS, rows, caption)


def _cells(group: Sequence[Run], reference: Sequence[Run]) -> list[str]:
    results = [run.result for run in group]
    tokens_per_s = statistics.median(result.throughput_tokens_per_s for result in results)
    return [
        f"{tokens_per_s:.1f}",
        f"{statistics.median(result.throughput_rps for result in results):.2f}",
        *_milliseconds([result.ttft for result in results]),
        *_milliseconds([result.normalized_latency for result in results]),
        f"{agreement(reference[0].result, results[0]):.0%}" if reference else "-",
        f"{max(run.foreign for run in group):.0%}",
        "; ".join(dict.fromkeys(problem for run in group for problem in run.problems)),
    ]


def _milliseconds(summaries: Sequence[LatencySummary | None]) -> tuple[str, str]:
    known = [summary for summary in summaries if summary is not None]
    if not known:
        return "-", "-"
    medians = (statistics.median(getattr(summary, name) for summary in known) for name in ("p50", "p99"))
    p50, p99 = (f"{median_s * 1e3:.3g}" if median_s < 1 else f"{median_s * 1e3:.0f}" for median_s in medians)
    return p50, p99
