"""Recorded events as plain data: the interface between the recorder, trace files, summaries and timelines.

``Recorder.recording()`` and ``read_trace()`` make a :class:`Recording`; everything after them only reads it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
