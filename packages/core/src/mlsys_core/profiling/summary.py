"""Time of a recording per span name, and values per counter. Read by ``mlsys trace summary``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.recording import Recording, Span, Track, place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


SortKey = Literal["total", "count", "p99"]


@dataclass(frozen=True, slots=True)
class SpanSummary:
    """All spans of one name, over all threads and processes."""

    name: str
    duration_s: Distribution
    self_s: float  # total less the time of spans nested directly within
    share_of_wall: float  # total over the recording's wall time; above 1 where spans ran side by side


@dataclass(frozen=True, slots=True)
class CounterSummary:
    """All finite samples of one counter of one process."""

    name: str
    pid: int
    num_samples: int
    min: float
    mean: float  # weighted by how long each value held; the last one holds until the recording's end
    max: float


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    """Summary of a recording."""

    wall_s: float  # from the first event to the end of the last
    num_events: int
    num_instants: int
    dropped: int  # events lost to full buffers: the figures below lack them
    spans: tuple[SpanSummary, ...]
    counters: tuple[CounterSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def warning(self) -> str:
        """Return a caution for readers of the figures; "" if there is none."""
        if not self.dropped:
            return ""
        return f"dropped events: {self.dropped}, as a buffer was full; the figures lack them; raise max_events"


def summarise_recording(recording: Recording, *, sort: SortKey = "total") -> RecordingSummary:
    """Condense ``recording`` to one row for each span name, the largest first by ``sort``.

    Raises:
        InvalidInputError: ``sort`` is none of total, count, p99.

    Example:
        >>> from mlsys_core.profiling import Recorder
        >>> recorder = Recorder()
        >>> recorder.complete("outer", 0, 10)
        >>> recorder.complete("inner", 2, 5)
        >>> [(row.name, round(row.self_s * 1e9)) for row in summarise_recording(recorder.recording()).spans]
        [('outer', 7), ('inner', 3)]
    """
    keys: dict[str, Callable[[SpanSummary], float]] = {
        "total": lambda row: row.duration_s.total,
        "count": lambda row: row.duration_s.count,
        "p99": lambda row: row.duration_s.p99,
    }
    if sort not in keys:
        raise InvalidInputError(f"cannot sort by {sort!r}: choose one of {', '.join(keys)}")
    start_ns, end_ns = recording.bounds_ns()
    wall_s = (end_ns - start_ns) / 1e9
    durations: dict[str, list[float]] = defaultdict(list)
    for span in recording.spans:
        durations[span.name].append(span.duration_ns / 1e9)
    self_ns = _self_ns(recording)
    rows = []
    for name, values in durations.items():
        duration_s = summarise(values)
        share = duration_s.total / wall_s if wall_s else 0.0
        rows.append(SpanSummary(name, duration_s, self_ns[name] / 1e9, share))
    rows.sort(key=lambda row: (-keys[sort](row), row.name))
    return RecordingSummary(
        wall_s=wall_s,
        num_events=recording.num_events,
        num_instants=len(recording.instants),
        dropped=recording.dropped,
        spans=tuple(rows),
        counters=tuple(_counters(recording, end_ns)),
    )


def _self_ns(recording: Recording) -> dict[str, int]:
    by_track: dict[Track, list[Span]] = defaultdict(list)
    for span in recording.spans:
        by_track[span.track].append(span)
    totals: dict[str, int] = defaultdict(int)
    for track, spans in by_track.items():
        for span, placement in zip(spans, place(track, spans), strict=True):
            totals[span.name] += span.duration_ns
            if placement.parent is not None:
                totals[spans[placement.parent].name] -= span.duration_ns
    return totals


def _counters(recording: Recording, end_ns: int) -> list[CounterSummary]:
    series: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for sample in recording.samples:
        if math.isfinite(sample.value):
            series[sample.name, sample.pid].append((sample.at_ns, sample.value))
    rows = []
    for (name, pid), points in sorted(series.items()):
        values = [value for _, value in points]
        held_ns = [later - at for (at, _), later in zip(points, [*(at for at, _ in points[1:]), end_ns], strict=True)]
        if sum(held_ns):
            mean = sum(value * held for value, held in zip(values, held_ns, strict=True)) / sum(held_ns)
        else:  # all at the recording's last moment
            mean = sum(values) / len(values)
        rows.append(CounterSummary(name, pid, len(values), min(values), mean, max(values)))
    return rows


def format_s(seconds: float) -> str:
    """Return ``seconds`` to three digits in the unit that fits.

    Example:
        >>> format_s(0.0012345), format_s(90)
        ('1.23 ms', '90 s')
    """
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if abs(seconds) * scale >= 1),
        ("ns", 1e9),
    )
    value = seconds * scale
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of ``count`` values, in their unit. Of no values, ``total`` is 0 and all else NaN."""

    count: int
    total: float
    mean: float
    std: float  # of the population (divides by count)
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; None in place of NaN, which JSON lacks."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def summarise(values: Sequence[float] | NDArray[np.floating[Any]]) -> Distribution:
    """Return count, mean, spread and percentiles of ``values``.

    Percentiles are NumPy's method ``linear`` (Hyndman and Fan's type 7): the q-th lies at position q (n - 1) of the
    sorted values, interpolated between its neighbours.

    Args:
        values: One-dimensional, finite, any unit.

    Raises:
        InvalidInputError: ``values`` has another number of dimensions, or holds NaN or infinity.

    Example:
        >>> summarise([1.0, 2.0, 3.0, 4.0]).p50
        2.5
    """
    import numpy as np  # here: the recorder's importers need no NumPy

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InvalidInputError(f"summarise takes a one-dimensional sequence of numbers, got shape {array.shape}")
    if array.size == 0:
        return Distribution(0, 0.0, *[math.nan] * 7)
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidInputError(f"values[{bad}] is {array[bad]}: only finite values have percentiles; leave it out")
    p50, p90, p99 = np.percentile(array, [50, 90, 99], method="linear").tolist()
    return Distribution(
        count=int(array.size),
        total=float(array.sum()),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(array.max()),
    )
