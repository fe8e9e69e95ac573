"""From outcomes to the report: medians, ratios, who could not be timed and why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from mlsys_core.report import Figure, Section, Table

from mlsys_nimble.bench.race import EAGER_TIMES, TOLERANCE, Outcome

EAGER, OURS, OURS_SINGLE = "eager", "Nimble", "Nimble, one stream"
PEERS = ("torch.compile", "AOTInductor", "ONNX Runtime", "OpenVINO")

Outcomes = Mapping[str, Mapping[str, Outcome]]  # by net, then by contestant


def report(outcomes: Outcomes, *, num_threads: int) -> Section:
    """Tables, a bar plot like figure 3.8, and everything as data."""
    from mlsys_core import plot

    groups = {net: {name: one.median_s for name, one in race.items()} for net, race in outcomes.items()}
    drawable = {net: group for net, group in groups.items() if group.get(EAGER)}
    body: list[str | Table | Figure] = [_table(outcomes), _everybody(outcomes), _verdict(outcomes)]
    body += _silent(outcomes)
    if drawable:
        figure = plot.bars(drawable, baseline=EAGER, title=f"Batch 1, float32, {num_threads} threads")
        body.append(Figure(plot.to_svg(figure), "Speed over eager PyTorch, as in figure 3.8: higher is better."))
    is_wrong = any(outcomes[net][name].status == "differs" for net in outcomes for name in (OURS, OURS_SINGLE))
    return Section("Nimble", body, status="failed" if is_wrong else "ok", data=_data(outcomes, num_threads))


def best_peer(race: Mapping[str, Outcome]) -> tuple[str, float] | None:
    """The fastest of :data:`PEERS`, and its seconds a call; None if none was timed."""
    timed = [(name, race[name].median_s) for name in PEERS if name in race]
    found = [(name, seconds) for name, seconds in timed if seconds is not None]
    return min(found, key=lambda pair: pair[1]) if found else None


def ratios(race: Mapping[str, Outcome]) -> tuple[float | None, float | None]:
    """How many times faster Nimble is than the best peer, and than eager."""
    ours, peer, eager = race[OURS].median_s, best_peer(race), race[EAGER].median_s
    if ours is None:
        return None, None
    return peer[1] / ours if peer else None, eager / ours if eager else None


def geometric_mean(values: list[float]) -> float | None:
    """None of no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _table(outcomes: Outcomes) -> Table:
    """Narrow enough for a terminal; everybody's times are in :func:`_everybody`."""
    rows = []
    for net, race in outcomes.items():
        over_peer, over_eager = ratios(race)
        peer = best_peer(race)
        ours = [_milliseconds(race[name]) for name in (OURS_SINGLE, OURS)]
        rows.append(
            [net, _milliseconds(race[EAGER]), peer[0] if peer else "-", *ours, _times(over_peer), _times(over_eager)]
        )
    columns = ["net", "eager", "best peer", "1 stream", "Nimble", "over peer", "over eager"]
    return Table(columns, rows, "Median milliseconds a call, and how many times faster Nimble is")


def _everybody(outcomes: Outcomes) -> Table:
    names = list(dict.fromkeys(name for race in outcomes.values() for name in race))
    rows = [
        [net, *(_milliseconds(race[name]) if name in race else "-" for name in names)] for net, race in outcomes.items()
    ]
    return Table(["median ms", *names], rows)


def _milliseconds(outcome: Outcome) -> str:
    if outcome.median_s is None:
        return {"left out": "-", "not installed": "missing"}.get(outcome.status, outcome.status)
    return f"{outcome.median_s * 1e3:.3g}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _verdict(outcomes: Outcomes) -> str:
    pairs = [ratios(race) for race in outcomes.values()]
    over_peer = geometric_mean([peer for peer, _ in pairs if peer is not None])
    over_eager = geometric_mean([eager for _, eager in pairs if eager is not None])
    return (
        f"Nimble, geometric means: {_times(over_peer)} the best peer's speed, {_times(over_eager)} eager's. Results "
        f"were compared with float64's first (off by at most {TOLERANCE:g} of the largest value, or {EAGER_TIMES:g} "
        "times what eager is); who differs is not timed."
    )


def _silent(outcomes: Outcomes) -> list[str]:
    """A line for each reason that a contestant was not timed, with the nets it holds for."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for net, race in outcomes.items():
        for name, one in race.items():
            if one.status != "timed":
                reasons.setdefault((name, one.status, one.note), []).append(net)
    return [f"{name}: {status} ({note}) on {', '.join(nets)}" for (name, status, note), nets in reasons.items()]


def _data(outcomes: Outcomes, num_threads: int) -> dict[str, object]:
    nets: dict[str, Any] = {}
    for net, race in outcomes.items():
        over_peer, over_eager = ratios(race)
        peer = best_peer(race)
        nets[net] = {
            "contestants": {name: _figures(one) for name, one in race.items()},
            "best_peer": peer[0] if peer else None,
            "over_best_peer": over_peer,
            "over_eager": over_eager,
        }
    return {"num_threads": num_threads, "tolerance": TOLERANCE, "nets": nets}


def _figures(outcome: Outcome) -> dict[str, object]:
    figures: dict[str, object] = {
        "status": outcome.status,
        "note": outcome.note,
        "difference": outcome.difference,
        "prepare_s": outcome.prepare_s,
        "calls": len(outcome.samples_s),
    }
    if len(outcome.samples_s) > 1:
        tenths = statistics.quantiles(outcome.samples_s, n=10)
        figures |= {"median_s": outcome.median_s, "p10_s": tenths[0], "p90_s": tenths[-1]}
    return figures
