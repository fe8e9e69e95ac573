"""Recordings as Chrome-trace JSON files, which https://ui.perfetto.dev and chrome://tracing open, and back.

The format is the published "Trace Event Format" in its object form; ``trace_event.schema.json`` beside this file is our
schema of it. Written are complete spans (``X``), thread instants (``i``), counters (``C``) and names (``M``); read are
also begin-end pairs (``B``, ``E``) and the array form, so that files of other tools can be summarised.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_write
from mlsys_core.profiling.nesting import place
from mlsys_core.profiling.recording import FIRST_SYNTHETIC_ID, Recording, Track, plain

Event = dict[str, Any]


def write_trace(recording: Recording, path: str | Path) -> None:
    """Write ``recording`` as a Chrome trace; gzipped if the name ends in ``.gz``. The file appears whole or not at all.

    Times are microseconds since the first event. Partly overlapping spans of a track go to rows of their own
    (``requests``, ``requests (2)``), as viewers require; on a named track so do overlapping spans of the same name.
    JSON has no NaN: in arguments it becomes the string ``"NaN"``; counter samples that are not finite are left out and
    counted in ``otherData.nonfinite_samples``.

    Raises:
        InvalidInputError: the folder does not exist.

    Example:
        >>> import tempfile
        >>> from mlsys_core.profiling import Recorder
        >>> recorder = Recorder()
        >>> with recorder.span("step"):
        ...     pass
        >>> path = Path(tempfile.mkdtemp()) / "run.json.gz"
        >>> write_trace(recorder.recording(), path)
        >>> [span.name for span in read_trace(path).spans]
        ['step']
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InvalidInputError(f"cannot write {path}: there is no folder {path.parent}; make it, or name another file")
    with atomic_write(path) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as zipped:
                _write(recording, cast(BinaryIO, zipped))
        else:
            _write(recording, file)


def trace_events(recording: Recording) -> Iterator[Event]:
    """Yield the events of the trace file, names first, then by time within each kind."""
    origin_ns = recording.bounds_ns()[0]
    rows = _Rows(recording)
    for index, process in enumerate(recording.processes):
        label = f"{process.name} ({process.host})" if process.host else process.name
        yield _metadata("process_name", process.pid, 0, name=label)
        yield _metadata("process_sort_index", process.pid, 0, sort_index=index)
    for index, (pid, tid, name) in enumerate(rows.names):
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=index)
    for span, tid in zip(recording.spans, rows.tid_of_span, strict=True):
        start, duration = (span.start_ns - origin_ns) / 1000, span.duration_ns / 1000
        event = {"ph": "X", "name": span.name, "ts": start, "dur": duration, "pid": span.track.pid, "tid": tid}
        yield event | ({"args": plain(span.args)} if span.args else {})
    for instant in recording.instants:
        tid = rows.tid_of_track[instant.track]
        at = (instant.at_ns - origin_ns) / 1000
        event = {"ph": "i", "name": instant.name, "ts": at, "pid": instant.track.pid, "tid": tid, "s": "t"}
        yield event | ({"args": plain(instant.args)} if instant.args else {})
    for sample in recording.samples:
        if math.isfinite(sample.value):
            at = (sample.at_ns - origin_ns) / 1000
            args = {"value": plain(sample.value)}
            yield {"ph": "C", "name": sample.name, "ts": at, "pid": sample.pid, "tid": 0, "args": args}


def read_trace(path: str | Path) -> Recording:
    """Read a Chrome trace, plain or gzipped, of this or another tool.

    Phases other than ``X``, ``B``, ``E``, ``i``, ``I``, ``C`` and ``M`` (flows, async, objects) are passed over.

    Raises:
        InvalidInputError: the file is missing, no JSON, or no trace; the message names the first bad event.
    """
    from mlsys_core.profiling.trace_reader import parse_trace  # here: who only writes need not load it

    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise InvalidInputError(f"cannot read the trace {path}: {error}") from error
    return parse_trace(content, str(path))


class _Rows:
    """Rows (pid, tid) of the viewer for each track and span; pairs are unique, lanes are rows of their own.

    Threads keep their ids. All other rows are numbered in their order of display, as Perfetto sorts by tid.
    """

    def __init__(self, recording: Recording) -> None:
        self.names: list[tuple[int, int, str]] = []
        self.tid_of_track: dict[Track, int] = {}
        self.tid_of_span: list[int] = [0] * len(recording.spans)
        self._used: set[tuple[int, int]] = set()
        members: dict[Track, list[int]] = defaultdict(list)
        for index, span in enumerate(recording.spans):
            members[span.track].append(index)
        for track in recording.tracks():
            indices = members[track]
            lanes = [placement.lane for placement in place(track, [recording.spans[i] for i in indices])]
            tids = [self._row(track, lane) for lane in range(max(lanes, default=0) + 1)]
            self.tid_of_track[track] = tids[0]
            for index, lane in zip(indices, lanes, strict=True):
                self.tid_of_span[index] = tids[lane]

    def _row(self, track: Track, lane: int) -> int:
        tid = track.tid
        if lane or track.is_named or (track.pid, tid) in self._used:
            tid = FIRST_SYNTHETIC_ID + len(self._used)  # no thread's, and rising
        self._used.add((track.pid, tid))
        self.names.append((track.pid, tid, f"{track.name} ({lane + 1})" if lane else track.name))
        return tid


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _write(recording: Recording, file: BinaryIO) -> None:
    other: dict[str, Any] = {"producer": "mlsys", "dropped_events": recording.dropped}
    other["nonfinite_samples"] = sum(not math.isfinite(sample.value) for sample in recording.samples)
    if recording.anchor:
        offset_ns = recording.bounds_ns()[0] - recording.anchor.clock_ns
        other["origin_unix_ns"] = str(recording.anchor.wall_ns + offset_ns)  # a string: beyond a JSON reader's 2**53
    head = json.dumps({"displayTimeUnit": "ns", "otherData": other})[:-1]
    file.write(f'{head}, "traceEvents": ['.encode())
    separator = "\n"
    for event in trace_events(recording):
        line = json.dumps(event, separators=(",", ":"), allow_nan=False)  # ASCII: other signs are escaped
        file.write(f"{separator}{line}".encode())
        separator = ",\n"
    file.write(b"\n]}\n")
