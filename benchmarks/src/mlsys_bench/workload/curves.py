"""Throughput against latency, in the style of :mod:`mlsys_core.plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from mlsys_core.plot import MARKERS, PALETTE, house_style, label_log, load, new_axes, require_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlsys_core.workload import LoadPoint


@house_style()
def throughput_latency(systems: Mapping[str, Sequence[LoadPoint]], *, title: str | None = None) -> Figure:
    """Plot median latency per output token against throughput, a curve per system (ORCA, figure 10; thesis, 4.8).

    A curve follows the load: past saturation it goes straight up. If any run has no token counts, the
    median end-to-end latency is drawn for all.

    Raises:
        InvalidInputError: there is no system, or one without a run.
    """
    require_data(systems, "give each system at least one run")
    normalized = all(point.normalized_latency is not None for points in systems.values() for point in points)
    ylabel = "median normalised latency (ms/token)" if normalized else "median latency (ms)"
    figure, axes = new_axes("throughput (requests/s)", ylabel, title)
    for (name, points), color, marker in zip(systems.items(), cycle(PALETTE), cycle(MARKERS), strict=False):
        ordered = sorted(points, key=load)
        summaries = [point.normalized_latency if normalized else point.latency for point in ordered]
        medians_ms = [summary.p50 * 1e3 for summary in summaries if summary is not None]
        axes.plot([point.throughput_rps for point in ordered], medians_ms, label=name, color=color, marker=marker)
    axes.set_yscale("log")
    label_log(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend()
    return figure
