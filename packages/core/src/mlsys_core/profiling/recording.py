"""Recorded events as plain data: the interface between the recorder, trace files and summaries.

``Recorder.recording()`` and ``read_trace()`` make a :class:`Recording`; everything after them only reads it. Spans of
concurrent requests on one named track may overlap partly; :func:`place` puts those on further lanes, as viewers need.
A worker process sends its recording to its parent as compact bytes (JSON under zlib: reading them runs no code).
"""

from __future__ import annotations

import heapq
import json
import math
import zlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mlsys_core.errors import InvalidInputError

FIRST_SYNTHETIC_ID = 2**31  # ids of named tracks and renumbered processes: above the systems' own, within 32 bits

Args = Mapping[str, Any]


class Anchor(NamedTuple):
    """One moment on two clocks; aligns recordings of several hosts."""

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

    def shifted(self, offset_ns: int) -> Recording:
        """Return the same recording with ``offset_ns`` added to all times of its clock."""
        if offset_ns == 0:
            return self
        return replace(
            self,
            spans=tuple(s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in self.spans),
            instants=tuple(i._replace(at_ns=i.at_ns + offset_ns) for i in self.instants),
            samples=tuple(s._replace(at_ns=s.at_ns + offset_ns) for s in self.samples),
            anchor=self.anchor and self.anchor._replace(clock_ns=self.anchor.clock_ns + offset_ns),
        )


def named_track(pid: int, name: str) -> Track:
    """Return the track ``name`` of a process: its id comes from the name, so all its recordings agree."""
    return Track(pid, FIRST_SYNTHETIC_ID + zlib.crc32(name.encode(errors="backslashreplace")) % 2**30, name)


def merge(recordings: Iterable[Recording]) -> Recording:
    """Merge several recordings on the same clock; the first one's process and anchor lead.

    Processes of different hosts may have the same pid; viewers know processes by pid alone, so the later is renumbered.

    Example:
        >>> a, b = Recording((Process(7, "a", "left"),)), Recording((Process(7, "b", "right"),))
        >>> [process.pid for process in merge([a, b]).processes]
        [7, 2147483648]
    """
    parts = list(recordings)
    pids: dict[tuple[str, int], int] = {}
    processes: dict[int, Process] = {}
    renumbered: list[Recording] = []
    for part in parts:
        mapping: dict[int, int] = {}
        for process in part.processes:
            key = (process.host, process.pid)
            if key not in pids:
                pids[key] = process.pid if process.pid not in processes else _free_id(processes)
                processes[pids[key]] = process._replace(pid=pids[key])
            mapping[process.pid] = pids[key]
        renumbered.append(_with_pids(part, mapping))
    return Recording(
        processes=tuple(processes.values()),
        spans=tuple(sorted((s for r in renumbered for s in r.spans), key=lambda s: (s.start_ns, -s.end_ns))),
        instants=tuple(sorted((i for r in renumbered for i in r.instants), key=lambda i: i.at_ns)),
        samples=tuple(sorted((s for r in renumbered for s in r.samples), key=lambda s: s.at_ns)),
        dropped=sum(part.dropped for part in parts),
        anchor=parts[0].anchor if parts else None,
    )


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


def _free_id(used: Mapping[int, object]) -> int:
    return max(FIRST_SYNTHETIC_ID - 1, *used) + 1


def _with_pids(recording: Recording, mapping: Mapping[int, int]) -> Recording:
    if all(old == new for old, new in mapping.items()):
        return recording
    tracks = {track: track._replace(pid=mapping[track.pid]) for track in recording.tracks()}
    return replace(
        recording,
        spans=tuple(s._replace(track=tracks[s.track]) for s in recording.spans),
        instants=tuple(i._replace(track=tracks[i.track]) for i in recording.instants),
        samples=tuple(s._replace(pid=mapping[s.pid]) for s in recording.samples),
    )


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


_VERSION = 1


class _Table:
    """Numbers values in order of first appearance."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.index.setdefault(value, len(self.index))


def encode_recording(recording: Recording) -> bytes:
    """Return ``recording`` as bytes; arguments become JSON values (see ``recording.plain``).

    Example:
        >>> recording = Recording((Process(1, "worker", "here"),), samples=(Sample("queue", 5, 2.0, 1),))
        >>> decode_recording(encode_recording(recording)) == recording
        True
    """
    name, track = _Table(), _Table()
    content = {
        "version": _VERSION,
        "spans": [[name(s.name), s.start_ns, s.duration_ns, track(s.track), plain(s.args)] for s in recording.spans],
        "instants": [[name(i.name), i.at_ns, track(i.track), plain(i.args)] for i in recording.instants],
        # repr tells NaN and the infinities apart, which JSON numbers cannot
        "samples": [[name(s.name), s.at_ns, repr(float(s.value)), s.pid] for s in recording.samples],
        "names": list(name.index),
        "tracks": list(track.index),
        "processes": recording.processes,
        "dropped": recording.dropped,
        "anchor": recording.anchor,
    }
    return zlib.compress(json.dumps(content, separators=(",", ":"), allow_nan=False).encode(), level=1)


def decode_recording(payload: bytes) -> Recording:
    """Return the recording that :func:`encode_recording` encoded as ``payload``.

    Raises:
        InvalidInputError: ``payload`` is anything else.
    """
    try:
        content = json.loads(zlib.decompress(payload))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this mlsys reads version {_VERSION}")
        names: list[str] = content["names"]
        tracks = [Track(*track) for track in content["tracks"]]
        return Recording(
            processes=tuple(Process(*process) for process in [content["processes"][0], *content["processes"][1:]]),
            spans=tuple(
                Span(names[n], start, start + dur, tracks[t], args) for n, start, dur, t, args in content["spans"]
            ),
            instants=tuple(Instant(names[n], at, tracks[t], args) for n, at, t, args in content["instants"]),
            samples=tuple(Sample(names[n], at, float(value), pid) for n, at, value, pid in content["samples"]),
            dropped=content["dropped"],
            anchor=Anchor(*content["anchor"]) if content["anchor"] else None,
        )
    except (zlib.error, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidInputError(
            f"these {len(payload)} bytes are no recording ({type(error).__name__}: {error}); "
            "pass what Recorder.dump() returned"
        ) from error
