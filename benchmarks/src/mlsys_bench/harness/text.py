"""Texts and tables of outcomes, the same in every suite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from mlsys_core.report import Section, Table

from mlsys_bench.harness.race import Outcome, Outcomes

MISSING = "-"


def milliseconds(outcome: Outcome | None) -> str:
    """Return the median of a call in milliseconds, or why there is none.

    Example:
        >>> milliseconds(Outcome("timed", turns_s=((0.5, 0.1234, 0.1),))), milliseconds(Outcome("differs"))
        ('123', 'differs')
    """
    if outcome is None or outcome.status == "left out":
        return MISSING
    if outcome.median_s is None:
        return "missing" if outcome.status == "not installed" else outcome.status
    return f"{outcome.median_s * 1e3:.3g}"


def times(ratio: float | None) -> str:
    """Return a ratio as text.

    Example:
        >>> times(1.234), times(None)
        ('1.23x', '-')
    """
    return MISSING if ratio is None else f"{ratio:.2f}x"


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the ratios that are there; None if none is."""
    known = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(statistics.fmean(known)) if known else None


def times_table(races: Mapping[str, Outcomes], subject: str, caption: str = "") -> Table:
    """Return a table of medians in milliseconds: a row for each race, a column for each case."""
    names = list(dict.fromkeys(name for outcomes in races.values() for name in outcomes))
    rows = [[race, *(milliseconds(outcomes.get(name)) for name in names)] for race, outcomes in races.items()]
    return Table([subject, *names], rows, caption or "Median milliseconds of a call")


def table_of(rows: Sequence[Any], caption: str = "") -> Table:
    """Return a table of equal dataclasses: a column for each field, headed by its name."""
    names = [each.name for each in fields(rows[0])] if rows else []
    return Table(
        [name.replace("_", " ") for name in names],
        [[_cell(getattr(row, name)) for name in names] for row in rows],
        caption,
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return MISSING if value is None else str(value)


def rows_section(
    title: str,
    rows: Sequence[Any],
    *texts: str,
    status: Literal["ok", "failed", "skipped"] = "ok",
    **data: object,
) -> Section:
    """Return a section with one table of dataclasses and its texts; its data are the rows and ``data``."""
    return Section(title, [*texts, table_of(rows)], status, {**data, "rows": [asdict(row) for row in rows]})


def untimed(races: Mapping[str, Outcomes]) -> list[str]:
    """Return a line for each reason that a case was not timed, with the races it holds for."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for race, outcomes in races.items():
        for name, one in outcomes.items():
            if one.status != "timed":
                reasons.setdefault((name, one.status, one.note), []).append(race)
    return [
        f"{name}: {status}{f' ({note})' if note else ''} on {', '.join(where)}"
        for (name, status, note), where in reasons.items()
    ]


def status_of(
    races: Mapping[str, Outcomes], ours: str, failures: Collection[str] = ("differs",)
) -> Literal["ok", "failed"]:
    """Return ``failed`` if a case whose name begins with ``ours`` ended as one of ``failures``, else ``ok``."""
    own = [one for outcomes in races.values() for name, one in outcomes.items() if name.startswith(ours)]
    return "failed" if any(one.status in failures for one in own) else "ok"
