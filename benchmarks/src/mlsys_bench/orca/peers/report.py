"""Turn runs into rows: problems of a run, its score, medians over turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.workload import LatencySummary

from mlsys_bench.workload.results import LoadResult


@dataclass(frozen=True, slots=True)
class Run:
    """One case under one traffic, once."""

    case: str
    traffic: str
    result: LoadResult
    share_of_others: float  # of the machine, that other processes took: 0 to 1
    problems: tuple[str, ...]  # why its figures cannot be compared; empty: they can

    def to_json(self) -> dict[str, Any]:
        """Return its figures as JSON values, without the single requests."""
        return {
            "case": self.case,
            "traffic": self.traffic,
            "share_of_others": self.share_of_others,
            "problems": list(self.problems),
            **self.result.summary(),
        }

    def __str__(self) -> str:
        result, latency = self.result, self.result.normalized_latency
        figures = f"{result.throughput_tokens_per_s:.1f} tokens/s, {latency.p50 * 1e3 if latency else 0:.0f} ms/token"
        return "; ".join([f"{figures}, other load {self.share_of_others:.0%}", *self.problems])


@dataclass(frozen=True, slots=True)
class Row:
    """One case under one traffic: medians over its turns."""

    traffic: str
    case: str
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    token_p50_ms: float | None
    token_p99_ms: float | None
    as_ours: str  # share of the requests that our own case answered with the same text
    other_load: str  # the largest of its turns
    problems: str


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
    """Return the score that tuning maximises; 0 for a run with problems.

    Output tokens per second, or online the inverse median normalised latency.
    """
    if run.problems:
        return 0.0
    if is_offline:
        return run.result.throughput_tokens_per_s
    normalized = run.result.normalized_latency
    return 0.0 if normalized is None else 1.0 / normalized.p50


def agreement(ours: LoadResult, theirs: LoadResult) -> float:
    """Return the share of requests with the same whole text, as tokens and texts are one to one."""
    expected = {record.index: record.output for record in ours.successes}
    same = [expected.get(record.index) == record.output for record in theirs.successes]
    return sum(same) / len(expected) if expected else 0.0


def rows_of(runs: Sequence[Run], *, ours: str) -> list[Row]:
    """Return a row for each traffic and case, in order of their first run.

    Args:
        runs: Of all cases and turns.
        ours: The case with whose answers those of each are compared.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.traffic, run.case), []).append(run)
    order = list(dict.fromkeys(traffic for traffic, _ in groups))
    return [
        _row(*key, groups[key], groups.get((key[0], ours), ()))
        for key in sorted(groups, key=lambda key: order.index(key[0]))
    ]


def _row(traffic: str, case: str, group: Sequence[Run], reference: Sequence[Run]) -> Row:
    results = [run.result for run in group]
    return Row(
        traffic,
        case,
        statistics.median(result.throughput_tokens_per_s for result in results),
        statistics.median(result.throughput_rps for result in results),
        *_milliseconds([result.ttft for result in results]),
        *_milliseconds([result.normalized_latency for result in results]),
        f"{agreement(reference[0].result, results[0]):.0%}" if reference else "-",
        f"{max(run.share_of_others for run in group):.0%}",
        "; ".join(dict.fromkeys(problem for run in group for problem in run.problems)),
    )


def _milliseconds(summaries: Sequence[LatencySummary | None]) -> tuple[float | None, float | None]:
    known = [summary for summary in summaries if summary is not None]
    if not known:
        return None, None
    return statistics.median(one.p50 for one in known) * 1e3, statistics.median(one.p99 for one in known) * 1e3
