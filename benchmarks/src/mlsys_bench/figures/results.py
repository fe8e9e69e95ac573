"""Read result files, and write their figures as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "results"
PROCESSORS = {
    "zen3": "Zen 3 (AVX2)",
    "zen5": "Zen 5 (AVX-512, bf16)",
    "zen4": "Zen 4 (AVX-512, bf16)",
    "emr": "Emerald Rapids (AVX-512, bf16)",
    "icx": "Ice Lake (AVX-512)",
    "spr": "Sapphire Rapids (AVX-512, AMX)",
    "h100": "H100 (80 GB), CUDA 13",
    "simulated": "simulated",
}


@cache
def load(name: str) -> Any:
    """Return the figures of a result file: a suite's results, or the lines of a journal (``.jsonl``) with its head."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    if name.endswith("l"):
        return [json.loads(line) for line in text.splitlines()]
    record = json.loads(text)
    return record.get("results", record)


def processor(name: str) -> str:
    """Return the processor that a file's name ends with, without its instructions.

    Example:
        >>> processor("orca-native-spr.json")
        'Sapphire Rapids'
    """
    return PROCESSORS[Path(name).stem.rpartition("-")[2]].partition(" (")[0]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns of numbers lean right."""
    lines = [list(row) for row in rows]
    are_numbers = (all(re.match(r"[*]*[-.\d]|$", cell) for cell in column) for column in zip(*lines, strict=True))
    rule = ["---:" if is_number else "---" for is_number in are_numbers]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, rule, *lines])


def number(value: float, digits: int = 3) -> str:
    """Return ``value`` with so many significant digits, and commas in thousands.

    Example:
        >>> number(0.019067), number(41.52), number(1234.5), number(2.0)
        ('0.0191', '41.5', '1,234', '2')
    """
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


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
