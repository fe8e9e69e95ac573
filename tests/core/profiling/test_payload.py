"""Recordings as bytes: equal again after the way through, and anything else refused."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.recording import (
    Anchor,
    Instant,
    Process,
    Recording,
    Sample,
    Span,
    Track,
    decode_recording,
    encode_recording,
)

LOOP, REQUESTS, OTHER = Track(1, 7, "loop"), Track(1, 2**31, "requests"), Track(2, 7, "loop")
WHOLE = Recording(
    processes=(Process(1, "engine", "here"), Process(2, "worker", ""), Process(3, "worker", "there")),
    spans=(
        Span("step", 100, 900, LOOP, {"batch": 4, "names": ["a", "ä"]}),
        Span("step", 200, 200, OTHER, None),
        Span("sampling", 300, 350, LOOP, {}),
    ),
    instants=(Instant("ready", 50, REQUESTS, None), Instant("step", 60, LOOP, {"x": 1.5})),
    samples=(Sample("queue", 10, -0.1, 2), Sample("loss", 20, math.inf, 1), Sample("queue", 30, 1e300, 3)),
    dropped=5,
    anchor=Anchor(12, 34),
)


def payload_of(**changes: Any) -> bytes:
    content = json.loads(zlib.decompress(encode_recording(WHOLE))) | changes
    return zlib.compress(json.dumps({key: value for key, value in content.items() if value is not ...}).encode())


def test_a_recording_is_equal_after_the_way_through() -> None:
    again = decode_recording(encode_recording(WHOLE))
    assert again == WHOLE
    assert [type(each) for each in (again.processes[0], again.spans[0], again.spans[0].track, again.anchor)] == [
        Process,
        Span,
        Track,
        Anchor,
    ]
    assert isinstance(again.processes, tuple)
    bare = Recording(processes=(Process(1, "w", ""),))
    assert decode_recording(encode_recording(bare)) == bare


def test_values_that_json_lacks_survive() -> None:
    values = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 3]
    recording = Recording((Process(1, "w", ""),), samples=tuple(Sample("x", 0, value, 1) for value in values))
    again = [sample.value for sample in decode_recording(encode_recording(recording)).samples]
    assert [repr(value) for value in again] == ["nan", "inf", "-inf", "-0.0", "5e-324", "3.0"]


def test_arguments_become_what_json_can_hold() -> None:
    recording = Recording((Process(1, "w", ""),), spans=(Span("a", 0, 1, LOOP, {"shape": (2, 3), "odd": math.nan}),))
    assert decode_recording(encode_recording(recording)).spans[0].args == {"shape": [2, 3], "odd": "NaN"}


def test_names_and_tracks_are_written_once() -> None:
    content = json.loads(zlib.decompress(encode_recording(WHOLE)))
    assert content["names"] == ["step", "sampling", "ready", "queue", "loss"]
    assert content["tracks"] == [list(LOOP), list(OTHER), list(REQUESTS)]
    many = Recording((Process(1, "w", ""),), samples=tuple(Sample("tokens per second", n, 1.0, 1) for n in range(999)))
    assert len(encode_recording(many)) < 8 * 999


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**62), st.floats(allow_nan=False))))
def test_any_samples_survive(samples: list[tuple[str, int, float]]) -> None:
    recording = Recording((Process(1, "w", ""),), samples=tuple(Sample(name, at, x, 1) for name, at, x in samples))
    assert decode_recording(encode_recording(recording)) == recording


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "Error -5"),
        (b"garbage", "Error -3"),
        (zlib.compress(b"{"), "JSONDecodeError"),
        (zlib.compress(b"\xff"), "UnicodeDecodeError"),
        (zlib.compress(b"[]"), "TypeError"),
        (payload_of(version=2), "version 2, this mlsys reads version 1"),
        (payload_of(version=...), "KeyError: 'version'"),
        *((payload_of(**{key: ...}), f"KeyError: '{key}'") for key in (
            "names", "tracks", "processes", "spans", "instants", "samples", "dropped", "anchor",
        )),
        (payload_of(names=[]), "IndexError"),
        (payload_of(processes=[]), "IndexError"),
        (payload_of(processes=[[1, "w"]]), "TypeError"),
        (payload_of(spans=[[0, 1, 2, 0]]), "ValueError"),
        (payload_of(samples=[[0, 1, "x", 0]]), "ValueError"),
        (payload_of(samples=5), "TypeError"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"these {len(payload)} bytes are no recording") as caught:
        decode_recording(payload)
    assert reason in str(caught.value)
    assert "pass what Recorder.dump() returned" in str(caught.value)
