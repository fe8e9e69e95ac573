"""Figures for reports: one style, matplotlib without pyplot's global state.

Each function takes plain data (durations in seconds) and returns a :class:`matplotlib.figure.Figure`; :func:`save`
writes it, :func:`to_svg` gives text for the HTML report. Equal data give equal bytes. Matplotlib is imported on the
first call; it comes with ``mlsys-core[plots]``.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsys_core.errors import InvalidInputError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from mlsys_core.workload import LoadPoint

# Okabe and Ito's colours, distinguishable to colour-blind readers; without their yellow, which white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # so that a grey print tells them apart too
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
SIZE_INCHES = (6.4, 4.0)


def require_matplotlib() -> None:
    """Raise ``MissingDependencyError`` with the command that installs matplotlib, where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("figures need matplotlib: pip install 'mlsys-core[plots]'")


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style within the context or decorated function, then restore the process's settings.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc says: figures must not depend on who draws them
        matplotlib.rcParams.update(_STYLE)
        yield


def new_axes(xlabel: str, ylabel: str, title: str | None) -> tuple[Figure, Axes]:
    """Return a figure of the house's size and its only axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title or "")
    axes.set_axisbelow(True)
    return figure, axes


def label_log(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2, 5, 10, ... in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def require_data(data: Mapping[str, Any] | Sequence[Any], what: str) -> None:
    """Raise ``InvalidInputError`` if there is nothing to plot, or nothing of one name."""
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
    require_data(systems, "give each system at least one run")
    figure, axes = new_axes("offered load (requests/s)", "latency (ms): p90, bars from p50 to p99", title)
    for (name, points), color, marker in zip(systems.items(), cycle(PALETTE), cycle(MARKERS), strict=False):
        ordered = sorted(points, key=load)
        latencies = [point.latency for point in ordered]
        p90 = np.array([latency.p90 for latency in latencies])
        below = [latency.p90 - latency.p50 for latency in latencies]
        above = [latency.p99 - latency.p90 for latency in latencies]
        axes.errorbar(
            [load(point) for point in ordered],
            p90 * 1e3,
            yerr=np.array([below, above]) * 1e3,
            label=name,
            color=color,
            marker=marker,
            capsize=3,
            elinewidth=0.8,
        )
    axes.set_yscale("log")
    label_log(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def load(point: LoadPoint) -> float:
    """Return the offered load, or the throughput of a closed loop, in requests a second."""
    return point.throughput_rps if point.offered_rps is None else point.offered_rps


@house_style()
def cdf(samples: Mapping[str, Sequence[float]], *, title: str | None = None) -> Figure:
    """Plot the share of latencies at or below each value, in milliseconds, a step curve for each name.

    Args:
        samples: Latencies in seconds, at least one for each name.
        title: Above the figure.

    Raises:
        InvalidInputError: there is no name, one without a value, or a value that is not finite.
    """
    require_data(samples, "give each name at least one value")
    figure, axes = new_axes("latency (ms)", "share of samples", title)
    for (name, values), color in zip(samples.items(), cycle(PALETTE), strict=False):
        ordered = np.sort(np.asarray(values, dtype=np.float64)) * 1e3
        if not np.isfinite(ordered).all():
            raise InvalidInputError(f"samples of {name!r} must be finite")
        axes.ecdf(ordered, label=name, color=color)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_ylim(0, 1.01)
    axes.legend(loc="lower right")
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
