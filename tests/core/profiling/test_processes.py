from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import Recorder
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
    merge,
)

WORKER = """
import os, sys
from mlsys_core.profiling import Recorder
recorder = Recorder(process="worker 0")
with recorder.span("forward", batch=4, pid=os.getpid()):
    recorder.count("queue", 2)
sys.stdout.buffer.write(recorder.dump())
"""


def test_a_workers_events_stand_on_the_parents_clock() -> None:
    recorder = Recorder(process="engine")
    with recorder.span("iteration"):
        worker = subprocess.run([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, check=True)
    recorder.absorb(worker.stdout)

    recording = recorder.recording()
    outer, inner = recording.spans
    assert [(process.pid, process.name) for process in recording.processes] == [
        (os.getpid(), "engine"),
        (inner.track.pid, "worker 0"),
    ]
    assert (outer.name, inner.name) == ("iteration", "forward")
    assert inner.args == {"batch": 4, "pid": inner.track.pid}
    assert outer.start_ns < inner.start_ns <= inner.end_ns < outer.end_ns
    assert [(sample.name, sample.pid) for sample in recording.samples] == [("queue", inner.track.pid)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_empty_with_its_own_pid() -> None:
    recorder = Recorder()
    step = recorder.spanner("step")
    with step:
        pass
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        with step:
            pass
        theirs.send_bytes(recorder.dump())

    worker = context.Process(target=child)
    worker.start()
    assert ours.poll(30), "the child sent nothing"
    recorder.absorb(ours.recv_bytes())
    worker.join()
    assert [span.track.pid for span in recorder.recording().spans] == [os.getpid(), worker.pid]


def test_clocks_of_other_hosts_are_aligned_by_wall_time(new_clock: Callable[[], Any]) -> None:
    here_clock, there_clock = new_clock(), new_clock()
    there_clock.now = 5_000_000  # booted at another time
    wall = new_clock()
    here = Recorder(clock_ns=here_clock, wall_ns=wall, host="left")
    there = Recorder(clock_ns=there_clock, wall_ns=wall, host="right")
    for clock in (here_clock, there_clock, wall):
        clock.advance(100)
    there.instant("sent")
    for clock in (here_clock, there_clock, wall):
        clock.advance(40)
    here.instant("received")
    here.absorb(there.dump())
    recording = here.recording()
    assert [(i.name, i.at_ns) for i in recording.instants] == [("sent", 100), ("received", 140)]
    assert len({process.pid for process in recording.processes}) == 2, "the same pid on two hosts is two processes"


def test_the_same_host_needs_no_alignment(new_clock: Callable[[], Any]) -> None:
    clock, wall = new_clock(), new_clock()
    parent = Recorder(clock_ns=clock, wall_ns=wall, host="one")
    child = Recorder(clock_ns=clock, wall_ns=wall, host="one")
    child.instant("before")
    payload = child.dump()
    wall.advance(10**9)  # somebody set the wall clock
    parent.absorb(payload)
    assert parent.recording().instants[0].at_ns == 0


def test_dump_empties_so_that_a_worker_may_report_again_and_again(clock: Any) -> None:
    worker, parent = Recorder(clock_ns=clock), Recorder(clock_ns=clock)
    for value in range(3):
        worker.count("n", value)
        parent.absorb(worker.dump())
    assert [sample.value for sample in parent.recording(clear=True).samples] == [0, 1, 2]
    assert parent.recording().num_events == 0, "what was absorbed is handed out once too"


def test_absorbed_bytes_are_bounded_too(clock: Any) -> None:
    worker, parent = Recorder(clock_ns=clock), Recorder(clock_ns=clock, max_events=4)
    for value in range(10):
        worker.count("n", value)
        parent.absorb(worker.dump())
    recording = parent.recording()
    assert [sample.value for sample in recording.samples] == [6, 7, 8, 9]
    assert recording.dropped == 6


def test_merge_renumbers_every_mention_of_a_taken_pid() -> None:
    left, right = Recorder(host="left"), Recorder(host="right")
    for recorder in (left, right):
        recorder.count("queue", 1)
        recorder.instant("ready")
        with recorder.span("step"):
            time.monotonic()
    merged = merge([left.recording(), right.recording()])
    pids = [process.pid for process in merged.processes]
    assert len(set(pids)) == 2
    assert {sample.pid for sample in merged.samples} == set(pids)
    assert {span.track.pid for span in merged.spans} == set(pids)
    assert {instant.track.pid for instant in merged.instants} == set(pids)


def test_an_empty_recording_has_bounds_and_tracks() -> None:
    recording = Recording((Process(1, "mlsys", ""),))
    assert recording.bounds_ns() == (0, 0)
    assert recording.tracks() == []
    assert Track(1, 2, "t") == (1, 2, "t")


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
