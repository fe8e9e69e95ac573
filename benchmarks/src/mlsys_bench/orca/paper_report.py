"""The paper's evaluation as a report: a table and a figure like 4.8 and 4.9, and the ratio at equal latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlsys_core.report import Figure, Section, Table
from mlsys_core.workload import LoadPoint

from mlsys_bench.orca.paper import PAPERS_LATENCY_S, PAPERS_RATIO, Crossing, Curve, crossing

_PAPER = (
    f"The paper: {PAPERS_RATIO}x (6.81 over 0.185 req/s at {PAPERS_LATENCY_S * 1e3:.0f} ms), 175B on 16 GPUs, "
    "FasterTransformer as the baseline."
)


def report(
    method: str,
    heterogeneous: Sequence[Curve],
    homogeneous: Sequence[Curve],
    *,
    latencies_s: Mapping[str, float],
    notes: Sequence[str] = (),
    baseline_slowdown: float | None = None,
    is_wrong: bool = False,
    data: Mapping[str, Any] | None = None,
) -> Section:
    """Return the page's section.

    Args:
        method: Description of the measurement.
        heterogeneous: On the uniform lengths.
        homogeneous: On requests of one length.
        latencies_s: Where the ratio is read: what the latency is -> median normalised latency, seconds per token.
        notes: More to say, a paragraph each.
        baseline_slowdown: Read the ratios again as if the baseline's iterations took this many times as long.
        is_wrong: True if answers differed: the section has failed then.
        data: More for machines.
    """
    body: list[str | Table | Figure] = [method, *notes]
    crossings = {what: crossing(heterogeneous, latency_s) for what, latency_s in latencies_s.items()}
    if baseline_slowdown is not None:
        crossings |= {
            f"{what}, the baseline's iterations {baseline_slowdown:g} times as long": crossing(
                heterogeneous, latency_s, baseline_slowdown=baseline_slowdown
            )
            for what, latency_s in latencies_s.items()
        }
    if heterogeneous:
        body.append(_table(heterogeneous, "Requests of different lengths", is_normalized=True))
        body.append(_figure(heterogeneous, "Requests of different lengths (Figure 4.8)", is_normalized=True))
        body += [_sentence(what, each) for what, each in crossings.items()]
        body.append(_PAPER)
    if homogeneous:
        body.append(_table(homogeneous, "Requests of one length", is_normalized=False))
        body.append(_figure(homogeneous, "Requests of one length (Figure 4.9)", is_normalized=False))
    record = {
        **(data or {}),
        "crossings": {what: _crossing_record(each) for what, each in crossings.items()},
        "paper": {"ratio": PAPERS_RATIO, "latency_s": PAPERS_LATENCY_S},
        "heterogeneous": {curve.case.label: [_record(point) for point in curve.points] for curve in heterogeneous},
        "homogeneous": {curve.case.label: [_record(point) for point in curve.points] for curve in homogeneous},
    }
    return Section("Orca: the paper's evaluation", body, status="failed" if is_wrong else "ok", data=record)


def _sentence(what: str, at: Crossing) -> str:
    where = f"At a median normalised latency of {at.latency_s * 1e3:.3g} ms ({what}): "
    parts = [
        f"{name} {'no run that fast' if best is None else f'{best[1]:.3g} req/s with {best[0]}'}"
        for name, best in (("iteration-level", at.orca), ("request-level", at.request_level))
    ]
    return where + "; ".join(parts) + ("." if at.ratio is None else f"; {at.ratio:.1f}x.")


def _table(curves: Sequence[Curve], caption: str, *, is_normalized: bool) -> Table:
    columns = ("case", "offered req/s", "done req/s", "median ms/token" if is_normalized else "median ms")
    rows = []
    for curve in curves:
        for point in curve.points:
            summary = point.normalized_latency if is_normalized else point.latency
            offered = "-" if point.offered_rps is None else f"{point.offered_rps:.3g}"
            latency = "-" if summary is None else f"{summary.p50 * 1e3:.4g}"
            rows.append([curve.case.label, offered, f"{point.throughput_rps:.3g}", latency])
    return Table(columns, rows, caption=caption)


def _figure(curves: Sequence[Curve], caption: str, *, is_normalized: bool) -> Figure:
    from mlsys_core import plot

    from mlsys_bench.harness import plots

    points: dict[str, list[LoadPoint]] = {
        curve.case.label: [
            point if is_normalized else replace(point, normalized_latency=None) for point in curve.points
        ]
        for curve in curves
    }
    return Figure(plot.to_svg(plots.throughput_latency(points)), caption)


def _record(point: LoadPoint) -> dict[str, Any]:
    normalized = point.normalized_latency
    return {
        "offered_rps": point.offered_rps,
        "throughput_rps": point.throughput_rps,
        "median_latency_s": point.latency.p50,
        "median_normalized_latency_s": None if normalized is None else normalized.p50,
    }


def _crossing_record(at: Crossing) -> dict[str, Any]:
    return {"latency_s": at.latency_s, "orca": at.orca, "request_level": at.request_level, "ratio": at.ratio}
