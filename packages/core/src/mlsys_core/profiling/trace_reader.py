"""Parse Chrome-trace JSON into a recording, for ``chrome_trace.read_trace``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any, NoReturn

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.recording import (
    FIRST_SYNTHETIC_ID,
    Anchor,
    Instant,
    Process,
    Recording,
    Sample,
    Span,
    Track,
)

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
_LARGEST = sys.float_info.max  # of a sample; JSON's whole numbers have no bound


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
