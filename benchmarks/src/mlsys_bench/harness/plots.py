"""Figures of benchmarks, in the style of :mod:`mlsys_core.plot`: throughput, requests in order, grouped bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.plot import MARKERS, PALETTE, SIZE_INCHES, house_style, label_log, load, new_axes, require_data

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


@house_style()
def by_request(
    latencies_s: Mapping[str, Sequence[float]],
    *,
    steps: Sequence[int] = (),
    limit_s: float | None = None,
    title: str | None = None,
) -> Figure:
    """Plot each request's latency by its number, a point for each (DVABatch, figure 15).

    Args:
        latencies_s: of each system's requests, seconds above 0, in order of arrival.
        steps: numbers of requests at which something changes, such as the load: a line down.
        limit_s: a latency that is not to be exceeded: a line across.
        title: above the figure.

    Raises:
        InvalidInputError: there is no system, or one without a request.
    """
    require_data(latencies_s, "give each system at least one latency")
    figure, axes = new_axes("request (in order of arrival)", "latency (ms)", title)
    for (name, values), color in zip(latencies_s.items(), cycle(PALETTE), strict=False):
        axes.plot(np.asarray(values) * 1e3, ".", markersize=2, label=name, color=color, rasterized=True)
    for number in steps:
        axes.axvline(number, color="0.85", linewidth=0.6, zorder=0)
    if limit_s is not None:
        axes.axhline(limit_s * 1e3, color="0.3", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    label_log(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend(markerscale=5)
    return figure


@house_style()
def bars(
    groups: Mapping[str, Mapping[str, float | None]],
    *,
    baseline: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
) -> Figure:
    """Plot grouped bars with their values above; mark a case without a value in a group as missing.

    Args:
        groups: for each group (a model, a workload) each case's value.
        baseline: a case; the values are then durations, and the bars show its duration over theirs (speed-up).
        ylabel: with its unit; not needed with ``baseline``.
        title: above the figure.

    Raises:
        InvalidInputError: there is no group or an empty one, a group lacks the baseline, a duration is not above 0, or
            both or neither of ``baseline`` and ``ylabel`` are missing.

    Example:
        >>> figure = bars({"ResNet-50": {"eager": 0.066, "nimble": 0.033}}, baseline="eager")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['1.00', '2.00']
    """
    require_data(groups, "give each group at least one value")
    if baseline is None and ylabel is None:
        raise InvalidInputError("bars need a ylabel with a unit, or a baseline to be speed-ups over")
    heights = groups if baseline is None else {name: _speedups(name, group, baseline) for name, group in groups.items()}
    cases = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = new_axes("", ylabel or f"speed-up over {baseline}", title)
    figure.set_size_inches(max(SIZE_INCHES[0], 0.35 * len(groups) * (len(cases) + 1)), SIZE_INCHES[1])
    width = 0.8 / len(cases)
    for index, (case, color) in enumerate(zip(cases, cycle(PALETTE), strict=False)):
        values = [group.get(case) for group in heights.values()]
        left = np.arange(len(groups)) + (index - (len(cases) - 1) / 2) * width
        drawn = axes.bar(left, [value or 0.0 for value in values], width * 0.92, label=case, color=color)
        labels = ["missing" if value is None else _three_digits(value) for value in values]
        rotation = 90 if len(cases) > 3 else 0
        axes.bar_label(drawn, labels, padding=2, fontsize="x-small", rotation=rotation)
    if baseline is not None:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    axes.legend()
    return figure


def _speedups(name: str, group: Mapping[str, float | None], baseline: str) -> dict[str, float | None]:
    reference = group.get(baseline)
    if reference is None:
        raise InvalidInputError(f"group {name!r} has no value for the baseline {baseline!r}; it has {', '.join(group)}")
    for case, value in group.items():
        if value is not None and not value > 0:
            raise InvalidInputError(f"the duration of {case!r} in {name!r} is {value!r}: it must be above 0")
    return {case: None if value is None else reference / value for case, value in group.items()}


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.3g}"
