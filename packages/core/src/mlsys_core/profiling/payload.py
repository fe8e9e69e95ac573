"""A recording as compact bytes, to send from a worker process to its parent (``Recorder.dump``, ``absorb``).

JSON under zlib, with names and tracks as tables: no pickle, so reading a payload runs no code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.recording import Anchor, Instant, Process, Recording, Sample, Span, Track, plain

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
