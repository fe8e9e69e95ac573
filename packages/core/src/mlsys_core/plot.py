"""Figures for benchmarks and reports: one style, matplotlib without pyplot's global state.

Each function takes plain data (durations in seconds) and returns a :class:`matplotlib.figure.Figure`; :func:`save`
writes it, :func:`to_svg` gives text for the HTML report. Equal data give equal bytes. Matplotlib is imported on the
first call.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from mlsys_core.workload.results import LoadPoint

# Okabe and Ito's colours, distinguishable to colour-blind readers; without their yellow, which white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # so that a grey print tells them apart too
FORMATS = (".svg", ".png", ".pdf")
# No time of writing in the file.
_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".png": {},
    ".pdf": {"CreationDate": None},
}
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 5,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "mlsys",  # ids from the content, not from chance
}
_SIZE_INCHES = (6.4, 4.0)


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One bar of a :func:`timeline`."""

    lane: str  # the row: a worker, a stream, a request
    name: str  # the kind of work; gives the colour
    start_s: float
    end_s: float


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style within the context or decorated function, then restore the process's settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc says: figures must not depend on who draws them
        matplotlib.rcParams.update(_STYLE)
        yield


def _new_axes(xlabel: str, ylabel: str, title: str | None) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title or "")
    axes.set_axisbelow(True)
    return figure, axes


def _label_log(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2, 5, 10, ... in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _require_data(data: Mapping[str, Any] | Sequence[Any], what: str) -> None:
    parts = data.values() if isinstance(data, Mapping) else ()
    if len(data) == 0 or any(len(part) == 0 for part in parts):
        raise InvalidInputError(f"nothing to plot: {what}, got {data!r}")


@house_style()
def latency_vs_load(systems: Mapping[str, Sequence[LoadPoint]], *, title: str | None = None) -> Figure:
    """Plot latency against offered load, a curve per system: p90, bars from p50 to p99 (as BatchMaker's figure 7).

    Args:
        systems: each system's runs, at least one; in a closed loop the throughput stands for the load.
        title: above the figure.

    Raises:
        InvalidInputError: there is no system, or one without a run.

    Example:
        >>> from mlsys_core.workload import LatencySummary, LoadPoint
        >>> point = LoadPoint(offered_rps=4.0, throughput_rps=3.9, latency=LatencySummary.of([0.1, 0.2]))
        >>> latency_vs_load({"orca": [point]}).axes[0].get_xlabel()
        'offered load (requests/s)'
    """
    _require_data(systems, "give each system at least one run")
    figure, axes = _new_axes("offered load (requests/s)", "latency (ms): p90, bars from p50 to p99", title)
    for (name, points), color, marker in zip(systems.items(), cycle(PALETTE), cycle(_MARKERS), strict=False):
        ordered = sorted(points, key=_load)
        latencies = [point.latency for point in ordered]
        p90 = np.array([latency.p90 for latency in latencies])
        below = [latency.p90 - latency.p50 for latency in latencies]
        above = [latency.p99 - latency.p90 for latency in latencies]
        axes.errorbar(
            [_load(point) for point in ordered],
            p90 * 1e3,
            yerr=np.array([below, above]) * 1e3,
            label=name,
            color=color,
            marker=marker,
            capsize=3,
            elinewidth=0.8,
        )
    axes.set_yscale("log")
    _label_log(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def _load(point: LoadPoint) -> float:
    return point.throughput_rps if point.offered_rps is None else point.offered_rps


@house_style()
def throughput_latency(systems: Mapping[str, Sequence[LoadPoint]], *, title: str | None = None) -> Figure:
    """Plot median latency per output token against throughput, a curve per system (ORCA, figure 10; thesis, 4.8).

    A curve follows the load: past saturation it goes straight up. If any run has no token counts, the
    median end-to-end latency is drawn for all.

    Raises:
        InvalidInputError: there is no system, or one without a run.
    """
    _require_data(systems, "give each system at least one run")
    normalized = all(point.normalized_latency is not None for points in systems.values() for point in points)
    ylabel = "median normalised latency (ms/token)" if normalized else "median latency (ms)"
    figure, axes = _new_axes("throughput (requests/s)", ylabel, title)
    for (name, points), color, marker in zip(systems.items(), cycle(PALETTE), cycle(_MARKERS), strict=False):
        ordered = sorted(points, key=_load)
        summaries = [point.normalized_latency if normalized else point.latency for point in ordered]
        medians_ms = [summary.p50 * 1e3 for summary in summaries if summary is not None]
        axes.plot([point.throughput_rps for point in ordered], medians_ms, label=name, color=color, marker=marker)
    axes.set_yscale("log")
    _label_log(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


@house_style()
def cdf(
    samples: Mapping[str, Sequence[float]],
    *,
    xlabel: str = "latency (ms)",
    scale: float = 1e3,
    log: bool = False,
    title: str | None = None,
) -> Figure:
    """Plot the share of samples at or below each value, a step curve for each name.

    Args:
        samples: at least one value for each name, in seconds unless ``scale`` says otherwise.
        xlabel: with its unit.
        scale: the values are multiplied by it; 1e3 turns seconds into the milliseconds of ``xlabel``.
        log: logarithmic values; they must then be above 0.
        title: above the figure.

    Raises:
        InvalidInputError: there is no name, one without a value, or a value that is not finite.
    """
    _require_data(samples, "give each name at least one value")
    figure, axes = _new_axes(xlabel, "share of samples", title)
    for (name, values), color in zip(samples.items(), cycle(PALETTE), strict=False):
        ordered = np.sort(np.asarray(values, dtype=np.float64)) * scale
        if not np.isfinite(ordered).all() or (log and ordered[0] <= 0):
            raise InvalidInputError(f"samples of {name!r} must be finite{', and above 0 on a log axis' if log else ''}")
        axes.ecdf(ordered, label=name, color=color)
    if log:
        axes.set_xscale("log")
        _label_log(axes.xaxis)
    else:
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_ylim(0, 1.01)
    axes.legend(loc="lower right")
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
    _require_data(latencies_s, "give each system at least one latency")
    figure, axes = _new_axes("request (in order of arrival)", "latency (ms)", title)
    for (name, values), color in zip(latencies_s.items(), cycle(PALETTE), strict=False):
        axes.plot(np.asarray(values) * 1e3, ".", markersize=2, label=name, color=color, rasterized=True)
    for number in steps:
        axes.axvline(number, color="0.85", linewidth=0.6, zorder=0)
    if limit_s is not None:
        axes.axhline(limit_s * 1e3, color="0.3", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    _label_log(axes.yaxis)
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
    _require_data(groups, "give each group at least one value")
    if baseline is None and ylabel is None:
        raise InvalidInputError("bars need a ylabel with a unit, or a baseline to be speed-ups over")
    heights = groups if baseline is None else {name: _speedups(name, group, baseline) for name, group in groups.items()}
    cases = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = _new_axes("", ylabel or f"speed-up over {baseline}", title)
    figure.set_size_inches(max(_SIZE_INCHES[0], 0.35 * len(groups) * (len(cases) + 1)), _SIZE_INCHES[1])
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


@house_style()
def timeline(spans: Sequence[TimelineSpan], *, title: str | None = None) -> Figure:
    """Plot spans on a time axis: a row per lane, in order of first appearance from the top, a colour per name.

    Raises:
        InvalidInputError: there is no span, or one ends before it starts.
    """
    from matplotlib.patches import Patch

    _require_data(spans, "give at least one span")
    for span in spans:
        if not span.end_s >= span.start_s:
            raise InvalidInputError(f"span {span.name!r} on {span.lane!r} ends at {span.end_s!r}, before its start")
    lanes = list(dict.fromkeys(span.lane for span in spans))
    colors = dict(zip(dict.fromkeys(span.name for span in spans), cycle(PALETTE), strict=False))
    figure, axes = _new_axes("time (ms)", "", title)
    figure.set_size_inches(8.0, max(2.0, 0.35 * len(lanes) + 1.4))
    for row, lane in enumerate(lanes):
        for name, color in colors.items():
            own = [(span.start_s, span.end_s) for span in spans if span.lane == lane and span.name == name]
            ranges_ms = [(start_s * 1e3, (end_s - start_s) * 1e3) for start_s, end_s in own]
            axes.broken_barh(ranges_ms, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend([Patch(color=color) for color in colors.values()], list(colors), loc="outside lower center", ncols=5)
    return figure


def check_format(path: Path) -> None:
    """Raise ``InvalidInputError`` unless :func:`save` can write a file of this name; call it before long work."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInputError(f"a figure cannot be written as {path.name!r}: end the name in {', '.join(FORMATS)}")


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` in the format that the name of ``path`` ends in.

    Raises:
        InvalidInputError: that is none of :data:`FORMATS`, or the file cannot be written.
    """
    check_format(path)
    data = _rendered(figure, path.suffix.lower())
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InvalidInputError(f"the figure cannot be written to {path}: {error}") from error


def to_svg(figure: Figure) -> str:
    """Return ``figure`` as an ``<svg>`` element, ready for an HTML page; equal figures give equal text."""
    text = _rendered(figure, ".svg").decode()
    return text[text.index("<svg") :]  # HTML takes no XML declaration and no document type


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format=suffix.removeprefix("."), metadata=_METADATA[suffix])
    return buffer.getvalue()
