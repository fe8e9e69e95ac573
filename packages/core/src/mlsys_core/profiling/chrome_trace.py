"""Recordings as Chrome-trace JSON files, which https://ui.perfetto.dev and chrome://tracing open, and back.

The format is the published "Trace Event Format" in its object form; ``trace_event.schema.json`` beside this file is our
schema of it. Written are complete spans (``X``), thread instants (``i``), counters (``C``) and names (``M``); read are
also begin-end pairs (``B``, ``E``) and the array form, so that files of other tools can be summarised.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_write
from mlsys_core.profiling.recording import (
    FIRST_SYNTHETIC_ID,
    Anchor,
    Instant,
    Process,
    Recording,
    Sample,
    Span,
    Track,
    place,
    plain,
)

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


_TIMED = frozenset("XBEiIC")


def parse_trace(content: bytes, source: str) -> Recording:
    """Return the recording in ``content``, a JSON document in object or array form; ``source`` names it in errors.

    Raises:
        InvalidInputError: it is neither; the message names the first event that is wrong.
    """
    document = _load(content, source)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InvalidInputError(
            f"{source} is JSON but no Chrome trace: expected an object with a list 'traceEvents', or a list of events"
        )
    other = document.get("otherData") if isinstance(document, dict) else None
    return _Reader(source).read(events, other if isinstance(other, dict) else {})


def _load(content: bytes, source: str) -> Any:
    text = content.decode("utf-8-sig", errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):  # the format lets a writer that died leave out the closing bracket
            try:
                return json.loads(text.rstrip().rstrip(",") + "]")
            except (ValueError, RecursionError):
                pass
        raise InvalidInputError(
            f"{source} is no Chrome trace: not JSON ({error}); write one with write_trace() or a tool's trace export"
        ) from error


_LATEST_US = 1e18  # some 30,000 years
_LARGEST = sys.float_info.max  # of a sample; JSON's integers have no bound


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.ids: dict[object, int] = {}  # some tools use strings for pid and tid
        self.process_names: dict[int, str] = {}
        self.thread_names: dict[tuple[int, int], str] = {}
        self.tracks: dict[tuple[int, int], Track] = {}

    def read(self, events: list[Any], other: dict[str, Any]) -> Recording:
        timed: list[tuple[dict[str, Any], int]] = []
        for index, event in enumerate(events):
            if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
                self._refuse(index, "it is no object with a string 'ph'")
            if event["ph"] == "M":
                self._name(event)
            elif event["ph"] in _TIMED:
                timed.append((event, index))
        timed.sort(key=lambda item: self._number(item[0], "ts", item[1]))

        spans: list[Span] = []
        instants: list[Instant] = []
        samples: list[Sample] = []
        begun: dict[Track, list[dict[str, Any]]] = defaultdict(list)
        for event, index in timed:
            pid = self._id(event.get("pid", 0))
            at_ns = _ns(event["ts"])
            if event["ph"] == "C":
                samples += self._samples(event, index, at_ns, pid)
                continue
            track = self._track(pid, event.get("tid", 0))
            if event["ph"] == "B":
                begun[track].append(event)
            elif event["ph"] == "E":
                if begun[track]:  # else its begin was lost, as rings do
                    begin = begun[track].pop()
                    args = {**_args(begin), **_args(event)}
                    spans.append(Span(self._text(begin, index), _ns(begin["ts"]), at_ns, track, args or None))
            elif event["ph"] == "X":
                end_ns = _ns(event["ts"] + self._number(event, "dur", index, least=0.0))
                spans.append(Span(self._text(event, index), at_ns, end_ns, track, _args(event) or None))
            else:
                instants.append(Instant(self._text(event, index), at_ns, track, _args(event) or None))
        spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
        return Recording(
            processes=tuple(Process(pid, name, "") for pid, name in self.process_names.items()),
            spans=tuple(spans),
            instants=tuple(instants),
            samples=tuple(samples),
            dropped=_integer(other.get("dropped_events")) or 0,
            anchor=Anchor(0, unix_ns) if (unix_ns := _integer(other.get("origin_unix_ns"))) else None,
        )

    def _name(self, event: dict[str, Any]) -> None:
        name = _args(event).get("name")
        pid = self._id(event.get("pid", 0))
        if event.get("name") == "process_name" and name is not None:
            self.process_names[pid] = str(name)
        elif event.get("name") == "thread_name" and name is not None:
            self.thread_names[pid, self._id(event.get("tid", 0))] = str(name)

    def _id(self, value: object) -> int:
        if isinstance(value, int):
            return value
        return self.ids.setdefault(str(value), 2 * FIRST_SYNTHETIC_ID + len(self.ids))

    def _track(self, pid: int, raw_tid: object) -> Track:
        tid = self._id(raw_tid)
        track = self.tracks.get((pid, tid))
        if track is None:
            self.process_names.setdefault(pid, f"process {pid}")
            name = self.thread_names.get((pid, tid), raw_tid if isinstance(raw_tid, str) else f"thread {tid}")
            track = self.tracks[pid, tid] = Track(pid, tid, name)
        return track

    def _samples(self, event: dict[str, Any], index: int, at_ns: int, pid: int) -> list[Sample]:
        self.process_names.setdefault(pid, f"process {pid}")
        name, series = self._text(event, index), _args(event)
        values = {key: v for key, v in series.items() if isinstance(v, (int, float)) and abs(v) <= _LARGEST}
        if len(series) == 1 and "value" in values:
            return [Sample(name, at_ns, values["value"], pid)]
        return [Sample(f"{name}.{key}", at_ns, value, pid) for key, value in values.items()]

    def _number(self, event: dict[str, Any], key: str, index: int, least: float = -_LATEST_US) -> float:
        value = event.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _LATEST_US:
            self._refuse(index, f"{key!r} of phase {event['ph']!r} must be finite microseconds, got {value!r}")
        return value

    def _text(self, event: dict[str, Any], index: int) -> str:
        name = event.get("name", "")
        if not isinstance(name, str):
            self._refuse(index, f"'name' must be a string, got {name!r}")
        return name

    def _refuse(self, index: int, reason: str) -> NoReturn:
        raise InvalidInputError(f"{self.source}: traceEvents[{index}] is no trace event: {reason}")


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _integer(value: object) -> int | None:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return None
