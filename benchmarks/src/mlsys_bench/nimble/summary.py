"""The report of the races on a CPU: medians, ratios, and why a case was not timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_core.report import Figure, Section, Table

from mlsys_bench.harness.race import Outcomes, fastest, speed_up
from mlsys_bench.harness.text import geometric_mean, milliseconds, status_of, times, times_table, untimed

# Of the largest difference from the net's results in float64, over the largest value; more where eager is as far off.
TOLERANCE, EAGER_TIMES = 1e-4, 3.0
EAGER, OURS, OURS_SINGLE = "eager", "Nimble", "Nimble, one stream"
PEERS = ("torch.compile", "AOTInductor", "ONNX Runtime", "OpenVINO")


def report(races: Mapping[str, Outcomes], *, num_threads: int) -> Section:
    """Return the tables, a bar plot like figure 3.8, and everything as data."""
    from mlsys_core import plot

    from mlsys_bench.harness import plots

    medians = {net: {name: one.median_s for name, one in outcomes.items()} for net, outcomes in races.items()}
    drawable = {net: group for net, group in medians.items() if group.get(EAGER)}
    body: list[str | Table | Figure] = [_table(races), times_table(races, "median ms"), _verdict(races)]
    body += untimed(races)
    if drawable:
        figure = plots.bars(drawable, baseline=EAGER, title=f"Batch 1, float32, {num_threads} threads")
        body.append(Figure(plot.to_svg(figure), "Speed over eager PyTorch, as in figure 3.8: higher is better."))
    return Section("Nimble", body, status=status_of(races, OURS), data=_data(races, num_threads))


def ratios(outcomes: Outcomes) -> tuple[float | None, float | None]:
    """Return how many times faster Nimble is than the best peer, and than eager."""
    peer = fastest(outcomes, PEERS)
    ours = outcomes.get(OURS)
    return speed_up(ours, outcomes.get(peer or "")), speed_up(ours, outcomes.get(EAGER))


def _table(races: Mapping[str, Outcomes]) -> Table:
    """Return a table narrow enough for a terminal; all times are in the next one."""
    rows = []
    for net, outcomes in races.items():
        own = [milliseconds(outcomes.get(name)) for name in (OURS_SINGLE, OURS)]
        over = map(times, ratios(outcomes))
        rows.append([net, milliseconds(outcomes.get(EAGER)), fastest(outcomes, PEERS) or "-", *own, *over])
    columns = ["net", "eager", "best peer", "1 stream", "Nimble", "over peer", "over eager"]
    return Table(columns, rows, "Median milliseconds a call, and how many times faster Nimble is")


def _verdict(races: Mapping[str, Outcomes]) -> str:
    over_peer, over_eager = (geometric_mean(column) for column in zip(*map(ratios, races.values()), strict=True))
    return (
        f"Nimble, geometric means: {times(over_peer)} the best peer's speed, {times(over_eager)} eager's; ratios are "
        f"medians over rounds. Results were compared with float64's first (off by at most {TOLERANCE:g} of the largest "
        f"value, or {EAGER_TIMES:g} times what eager is); a case that differs is not timed."
    )


def _data(races: Mapping[str, Outcomes], num_threads: int) -> dict[str, object]:
    nets: dict[str, Any] = {}
    for net, outcomes in races.items():
        over_peer, over_eager = ratios(outcomes)
        nets[net] = {
            "cases": {name: one.to_json() for name, one in outcomes.items()},
            "best_peer": fastest(outcomes, PEERS),
            "over_best_peer": over_peer,
            "over_eager": over_eager,
        }
    return {"num_threads": num_threads, "tolerance": TOLERANCE, "nets": nets}
