"""The table that opens each page of benchmarks: our speed over the strongest opponent's, losses first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mlsys_bench.figures.results import processor, table


class Ratio(NamedTuple):
    """Our speed over an opponent's."""

    ratio: float  # above 1: we are faster
    what: str
    against: str
    file: str  # result file, whose name ends with the machine
    command: str


def ratios(rows: Iterable[Ratio]) -> str:
    """Return the table of ``rows``, the lowest ratio first."""
    lines = [
        [row.what, row.against, f"**{row.ratio:.2f}x**", processor(row.file), f"`{row.command}`"]
        for row in sorted(rows)
    ]
    return table(["what", "against", "ratio", "machine", "command"], lines)


def over_best(speeds: Mapping[str, float], ours: str, *, peers: Iterable[str]) -> tuple[float, str]:
    """Return our speed over that of the fastest of ``peers``, and that peer."""
    peer = max(peers, key=lambda case: speeds[case])
    return speeds[ours] / speeds[peer], peer
