"""Recorded events as plain data: the interface between the recorder, trace files and summaries.

``Recorder.recording()`` and ``read_trace()`` make a :class:`Recording`; everything after them only reads it. Spans of
concurrent requests on one named track may overlap partly; :func:`place` puts those on further lanes, as viewers need.
"""

from __future__ import annotations

import heapq
import math
import zlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FIRST_SYNTHETIC_ID = 2**31  # ids of named tracks and renumbered processes: above the systems' own, within 32 bits

Args = Mapping[str, Any]


class Anchor(NamedTuple):
    """One moment on two clocks."""

    clock_ns: int  # the recorder's clock
    wall_ns: int  # nanoseconds since 1970, UTC


class Process(NamedTuple):
    """A process that recorded events."""

    pid: int
    name: str
    host: str  # "" where unknown


class Track(NamedTuple):
    """A row of spans: a thread, or a named track of a process."""

    pid: int
    tid: int
    name: str

    @property
    def is_named(self) -> bool:
        """True if it is no thread but a named track, such as that of all requests."""
        return FIRST_SYNTHETIC_ID <= self.tid < 2 * FIRST_SYNTHETIC_ID


class Span(NamedTuple):
    """A named interval of time."""

    name: str
    start_ns: int
    end_ns: int
    track: Track
    args: Args | None

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns


class Instant(NamedTuple):
    """A named event at one moment."""

    name: str
    at_ns: int
    track: Track
    args: Args | None


class Sample(NamedTuple):
    """The value of a counter from one moment on."""

    name: str
    at_ns: int
    value: float
    pid: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Spans, instants and counter samples of one or more processes on one clock.

    Example:
        >>> Recording(processes=(Process(1, "mlsys", ""),)).num_events
        0
    """

    processes: tuple[Process, ...]  # the recording process first
    spans: tuple[Span, ...] = ()  # by start; a span stands before those inside it
    instants: tuple[Instant, ...] = ()  # by time
    samples: tuple[Sample, ...] = ()  # by time
    dropped: int = 0  # events lost because a buffer was full
    anchor: Anchor | None = None  # None: the file says nothing about wall time

    @property
    def num_events(self) -> int:
        """Number of spans, instants and samples together."""
        return len(self.spans) + len(self.instants) + len(self.samples)

    def bounds_ns(self) -> tuple[int, int]:
        """Return the first start and last end of all events; (0, 0) if there are none."""
        starts = [events[0][1] for events in (self.spans, self.instants, self.samples) if events]
        if not starts:
            return (0, 0)
        ends = [events[-1].at_ns for events in (self.instants, self.samples) if events]
        return (min(starts), max([*ends, *(span.end_ns for span in self.spans)]))

    def tracks(self) -> list[Track]:
        """Return the tracks in use: by process, in order; threads by id, then named tracks as they first appear."""
        rank = {process.pid: index for index, process in enumerate(self.processes)}
        used = dict.fromkeys([*(span.track for span in self.spans), *(instant.track for instant in self.instants)])
        return sorted(used, key=lambda track: (rank.get(track.pid, len(rank)), min(track.tid, FIRST_SYNTHETIC_ID)))


def named_track(pid: int, name: str) -> Track:
    """Return the track ``name`` of a process: its id comes from the name, so all its recordings agree."""
    return Track(pid, FIRST_SYNTHETIC_ID + zlib.crc32(name.encode(errors="backslashreplace")) % 2**30, name)


def plain(value: object) -> Any:
    """Return ``value`` as a JSON value.

    JSON has no NaN and no infinities: they become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. NumPy
    scalars become numbers, other unknown objects their ``str``.

    Example:
        >>> plain({"loss": float("nan"), "shape": (2, 3)})
        {'loss': 'NaN', 'shape': [2, 3]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of NumPy or torch
        return plain(value.item())
    return str(value)


class Placement(NamedTuple):
    """Position of one span in its track."""

    lane: int  # 0 unless the span partly overlaps another one of its track
    depth: int  # number of spans of the lane around it
    parent: int | None  # index of the innermost span around it in the same lane


def nest(intervals: Sequence[tuple[int, int]], *, names: Sequence[str] | None = None) -> list[Placement]:
    """Place the spans of one track so that any two in a lane either nest or do not overlap.

    Spans are taken by start, the longer first; of equal ones the earlier in ``intervals`` is the parent. A span goes
    into the tightest span around it, else into the lowest lane that is free. O(n log n) for a bounded number of lanes.

    Args:
        intervals: (start, end) of each span, end >= start, in any one unit.
        names: Of each span. If given, spans of the same name never nest: one request is no part of another that
            happens to last longer.

    Returns:
        One placement for each interval, in the order given.

    Example:
        >>> [(p.lane, p.depth) for p in nest([(0, 10), (2, 4), (5, 15)])]
        [(0, 0), (0, 1), (1, 0)]
        >>> [(p.lane, p.depth) for p in nest([(0, 10), (2, 4)], names=["request", "request"])]
        [(0, 0), (1, 0)]
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    placements: list[Placement | None] = [None] * len(intervals)
    open_spans: list[list[int]] = []  # per lane, outermost first: indices of the spans not yet ended
    ends: list[tuple[int, int]] = []  # heap of (end, lane) of all open spans
    innermost: list[tuple[int, int]] = []  # sorted (end, lane) of the innermost open span of each busy lane
    free: list[int] = []  # heap of lanes without an open span
    open_names: Counter[str] = Counter()  # number of lanes with an open span of that name

    def lane_around(index: int) -> int | None:
        if names is not None and open_names[names[index]] == len(innermost):
            return None
        for position in range(bisect_left(innermost, (intervals[index][1], -1)), len(innermost)):
            lane = innermost[position][1]
            if names is None or all(names[other] != names[index] for other in open_spans[lane]):
                return innermost.pop(position)[1]
        return None

    for index in order:
        start, end = intervals[index]
        while ends and ends[0][0] <= start:
            ended, lane = heapq.heappop(ends)
            del innermost[bisect_left(innermost, (ended, lane))]
            left = open_spans[lane].pop()
            if names is not None:
                open_names[names[left]] -= 1
            if open_spans[lane]:
                insort(innermost, (intervals[open_spans[lane][-1]][1], lane))
            else:
                heapq.heappush(free, lane)
        around = lane_around(index)
        if around is not None:
            lane = around
        elif free:
            lane = heapq.heappop(free)
        else:
            lane = len(open_spans)
            open_spans.append([])
        stack = open_spans[lane]
        placements[index] = Placement(lane, len(stack), stack[-1] if stack else None)
        stack.append(index)
        if names is not None:
            open_names[names[index]] += 1
        insort(innermost, (end, lane))
        heapq.heappush(ends, (end, lane))
    return [placement for placement in placements if placement is not None]


def place(track: Track, spans: Sequence[Span]) -> list[Placement]:
    """Place the spans of ``track`` with :func:`nest`; on a named track spans of one name get separate lanes."""
    intervals = [(span.start_ns, span.end_ns) for span in spans]
    return nest(intervals, names=[span.name for span in spans] if track.is_named else None)
