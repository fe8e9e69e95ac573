from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import Recorder, Recording, read_trace, write_trace
from mlsys_core.profiling.chrome_trace import trace_events
from mlsys_core.profiling.recording import Process, Sample, Span, Track


@pytest.fixture(scope="module")
def validate() -> Any:
    schema = json.loads(resources.files("mlsys_core.profiling").joinpath("trace_event.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).validate


def load(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return json.loads(content, parse_constant=refuse)


def from_zero(recording: Recording) -> Recording:
    start_ns = recording.bounds_ns()[0]
    return replace(
        recording,
        spans=tuple(s._replace(start_ns=s.start_ns - start_ns, end_ns=s.end_ns - start_ns) for s in recording.spans),
        instants=tuple(i._replace(at_ns=i.at_ns - start_ns) for i in recording.instants),
        samples=tuple(s._replace(at_ns=s.at_ns - start_ns) for s in recording.samples),
        anchor=recording.anchor and recording.anchor._replace(clock_ns=recording.anchor.clock_ns - start_ns),
    )


def event(document: Any, name: str) -> Any:
    (found,) = [event for event in document["traceEvents"] if event["name"] == name]
    return found


def test_nested_spans_counters_and_instants(tmp_path: Path, validate: Any, clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, wall_ns=lambda: 1_700_000_000_000_000_000, process="engine", host="box")
    clock.advance(1_000_000)
    with recorder.span("outer", request="7"):
        clock.advance(1500)
        with recorder.span("inner"):
            clock.advance(250)
        recorder.count("queue", 5)
        recorder.instant("preempted", reason="memory")
    clock.advance(10)
    write_trace(recorder.recording(), tmp_path / "run.json")
    document = load(tmp_path / "run.json")
    validate(document)
    outer, inner = event(document, "outer"), event(document, "inner")
    assert (outer["ph"], outer["ts"], outer["dur"], outer["args"]) == ("X", 0.0, 1.75, {"request": "7"})
    assert (inner["ts"], inner["dur"], inner["pid"], inner["tid"]) == (1.5, 0.25, outer["pid"], outer["tid"])
    assert event(document, "process_name")["args"] == {"name": "engine (box)"}
    assert event(document, "thread_name")["args"] == {"name": "MainThread"}
    assert event(document, "queue")["args"] == {"value": 5}
    assert (event(document, "preempted")["s"], event(document, "preempted")["ts"]) == ("t", 1.75)
    # the wall clock stood still while 1760 ns of the other one passed since the first event
    assert document["otherData"]["origin_unix_ns"] == str(1_700_000_000_000_000_000 - 1760)


def test_threads_and_processes_are_told_apart(tmp_path: Path, validate: Any) -> None:
    parent = Recorder(process="engine", host="left")

    def work() -> None:
        with parent.span("in thread"):
            pass

    thread = threading.Thread(target=work, name="tokenizer")
    thread.start()
    thread.join()
    with parent.span("in main"):
        pass
    parent.count("queue", 2)
    own, start_ns = parent.recording(), parent.clock_ns()
    both = replace(
        own,
        processes=(*own.processes, Process(7, "worker", "right")),
        spans=(*own.spans, Span("in child", start_ns, start_ns, Track(7, 7, "MainThread"), None)),
        samples=(*own.samples, Sample("queue", start_ns, 1.0, 7)),
    )
    write_trace(both, tmp_path / "run.json")
    document = load(tmp_path / "run.json")
    validate(document)
    rows = {
        name: (event(document, name)["pid"], event(document, name)["tid"])
        for name in ("in thread", "in main", "in child")
    }
    assert len(set(rows.values())) == 3
    assert rows["in thread"][0] == rows["in main"][0] != rows["in child"][0]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names[rows["in thread"]] == "tokenizer"
    processes = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert processes[rows["in child"][0]] == "worker (right)"
    assert {e["pid"]: e["args"]["value"] for e in document["traceEvents"] if e["ph"] == "C"} == {
        rows["in main"][0]: 2,
        rows["in child"][0]: 1,
    }


def test_a_flow_of_counters_stays_in_order(tmp_path: Path, validate: Any, clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    for value in range(50):
        clock.advance(1000)
        recorder.count("queue", value)
        recorder.count("free blocks", 50.5 - value)
    write_trace(recorder.recording(), tmp_path / "run.json")
    document = load(tmp_path / "run.json")
    validate(document)
    series = defaultdict(list)
    for item in document["traceEvents"]:
        if item["ph"] == "C":
            series[item["name"]].append((item["ts"], item["args"]["value"]))
    assert series["queue"] == [(float(value), value) for value in range(50)]
    assert series["free blocks"][-1] == (49.0, 1.5)


def test_values_beyond_json(tmp_path: Path, validate: Any, clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, process="größe 模型 🚀")
    odd: dict[str, Any] = {
        "nan": float("nan"),
        "up": float("inf"),
        "down": -np.inf,
        "scalar": np.float32(0.5),
        "count": np.int64(3),
    }
    with recorder.span("schön \ud800 \u2028 </script>", **odd, path=Path("a"), shape=(1, None), nested={1: {2.5}}):
        pass
    for value in (1.0, float("nan"), float("inf"), np.float64(2.0)):
        recorder.count("loss", value)
    write_trace(recorder.recording(), tmp_path / "run.json")
    document = load(tmp_path / "run.json")
    validate(document)
    (span,) = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert span["name"] == "schön \ud800 \u2028 </script>"
    assert span["args"] == {
        "nan": "NaN", "up": "Infinity", "down": "-Infinity", "scalar": 0.5, "count": 3,
        "path": "a", "shape": [1, None], "nested": {"1": [2.5]},
    }  # fmt: skip
    assert [e["args"]["value"] for e in document["traceEvents"] if e["ph"] == "C"] == [1.0, 2.0]
    assert document["otherData"]["nonfinite_samples"] == 2
    assert document["otherData"]["dropped_events"] == 0


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.sampled_from("ab")), max_size=20)


@settings(max_examples=80)
@given(spans)
def test_rows_of_the_viewer_never_hold_crossing_spans(values: list[tuple[int, int, str]]) -> None:
    recorder = Recorder(clock_ns=lambda: 0)
    for start, duration, track in values:
        recorder.complete("s", start, start + duration, track=track)
    events = list(trace_events(recorder.recording()))
    rows = defaultdict(list)
    for item in events:
        if item["ph"] == "X":
            rows[item["pid"], item["tid"]].append((round(item["ts"] * 1000), round((item["ts"] + item["dur"]) * 1000)))
    assert sum(map(len, rows.values())) == len(values)
    for row in rows.values():
        open_ends: list[int] = []
        for start, end in row:  # in file order, as a viewer reads it
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(rows) == named


def test_crossing_spans_get_rows_named_after_their_track(tmp_path: Path, validate: Any) -> None:
    recorder = Recorder()
    for start in (0, 5, 8):
        recorder.complete("request", start, start + 10, track="requests")
    write_trace(recorder.recording(), tmp_path / "run.json")
    document = load(tmp_path / "run.json")
    validate(document)
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["requests", "requests (2)", "requests (3)"]


def test_rows_are_told_apart_and_stand_in_order() -> None:
    main, other = Track(1, 5, "main"), Track(1, 5, "same id")
    requests, batches = Track(1, 2**31 + 9, "requests"), Track(1, 2**31 + 2, "batches")
    spans = [
        Span(f"s{i}", i, i + 10, track, None) for i, track in enumerate((main, other, requests, requests, batches))
    ]
    events = trace_events(Recording((Process(1, "p", ""),), spans=tuple(spans)))
    rows = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert [name for _, name in rows] == ["main", "same id", "requests", "requests (2)", "batches"]
    tids = [tid for tid, _ in rows]
    assert tids[0] == 5
    assert tids == sorted(set(tids)), "viewers sort by tid"


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_round_trip(name: str, tmp_path: Path, clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, wall_ns=lambda: 1_700_000_000_123_456_789, max_events=6, host="")
    recorder.instant("lost")
    clock.advance(123_456_789_012_345)
    with recorder.span("outer", request="7"):
        clock.advance(1)
        with recorder.span("inner"):
            clock.advance(999)
        recorder.count("queue", 2.5)
        recorder.instant("ready", at=3)
        recorder.complete("request", clock.now - 40, clock.now + 77, track="requests")
    recorder.count("queue", 2)
    write_trace(recorder.recording(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b" if name.endswith("gz") else b"{")
    before = recorder.recording()
    before = from_zero(before)
    after = read_trace(tmp_path / name)
    assert after.processes == before.processes
    assert [(s.track.name, s.track.is_named) for s in after.spans] == [
        (s.track.name, s.track.is_named) for s in before.spans
    ]
    assert [s._replace(track=None) for s in after.spans] == [s._replace(track=None) for s in before.spans]  # type: ignore[arg-type]
    assert after.instants == before.instants
    assert after.samples == before.samples
    assert after.dropped == before.dropped == 1
    assert before.anchor is not None
    assert after.anchor is not None
    assert after.anchor.wall_ns - after.anchor.clock_ns == before.anchor.wall_ns - before.anchor.clock_ns


def test_begin_end_pairs_and_array_form_of_other_tools(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": "loop", "args": {"name": "main loop"}},
        {"ph": "E", "ts": 1, "pid": 1, "tid": "loop"},  # its begin was lost
        {"ph": "B", "name": "outer", "ts": 2, "pid": 1, "tid": "loop", "args": {"a": 1}},
        {"ph": "B", "name": "inner", "ts": 3.5, "pid": 1, "tid": "loop"},
        {"ph": "E", "ts": 4, "pid": 1, "tid": "loop"},
        {"ph": "E", "ts": 9, "pid": 1, "tid": "loop", "args": {"b": 2}},
        {"ph": "B", "name": "open", "ts": 9, "pid": 1, "tid": "loop"},
        {"ph": "s", "name": "flow", "id": 1, "ts": 3, "pid": 1, "tid": "loop"},
        {"ph": "C", "name": "memory", "ts": 5, "pid": "GPU 0", "args": {"used": 3, "free": 1, "note": "x"}},
        {"ph": "I", "name": "mark", "ts": 6, "pid": 1, "tid": 2},
    ]
    text = json.dumps(events)
    for name, content in (("whole.json", text), ("cut.json", text[:-1] + ",\n"), ("bom.json", "\ufeff" + text)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        recording = read_trace(tmp_path / name)
        assert [(s.name, s.start_ns, s.end_ns, s.args) for s in recording.spans] == [
            ("outer", 2000, 9000, {"a": 1, "b": 2}),
            ("inner", 3500, 4000, None),
        ]
        assert recording.spans[0].track.name == "main loop"
        assert [(s.name, s.at_ns, s.value) for s in recording.samples] == [
            ("memory.used", 5000, 3),
            ("memory.free", 5000, 1),
        ]
        assert [i.name for i in recording.instants] == ["mark"]
        assert recording.dropped == 0
        assert recording.anchor is None
        assert {s.pid for s in recording.samples} <= {process.pid for process in recording.processes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no Chrome trace: not JSON"),
        (b"hello", "is no Chrome trace: not JSON"),
        (b"[" * 100_000, "is no Chrome trace: not JSON"),
        (b"\x1f\x8b\x00broken", "cannot read the trace"),
        (b"{}", "is JSON but no Chrome trace: expected an object with a list 'traceEvents'"),
        (b'{"traceEvents": {}}', "is JSON but no Chrome trace"),
        (b"3", "is JSON but no Chrome trace"),
        (b"[1]", r"traceEvents\[0\] is no trace event: it is no object with a string 'ph'"),
        (b'[{"ph": "M"}, {"ph": 1}]', r"traceEvents\[1\] .* string 'ph'"),
        (b'[{"ph": "X", "name": "a", "dur": 1}]', r"traceEvents\[0\] .* 'ts' of phase 'X' .* got None"),
        (b'[{"ph": "X", "name": "a", "ts": 1}]', r"traceEvents\[0\] .* 'dur' .* got None"),
        (b'[{"ph": "X", "name": "a", "ts": 1, "dur": -1}]', "'dur' .* got -1"),
        (b'[{"ph": "X", "name": "a", "ts": NaN, "dur": 1}]', "'ts' .* got nan"),
        (b'[{"ph": "X", "name": 5, "ts": 1, "dur": 1}]', "'name' must be a string, got 5"),
    ],
)
def test_files_that_are_no_traces_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read the trace .*nowhere\.json"):
        read_trace(tmp_path / "nowhere.json")


def test_writing_needs_a_folder_and_replaces_a_file_only_when_whole(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"there is no folder .*absent"):
        write_trace(Recorder().recording(), tmp_path / "absent" / "run.json")
    path = tmp_path / "run.json"
    path.write_text("before")

    class Bad(str):
        def __str__(self) -> str:
            raise RuntimeError("cannot be read")

    recording = Recording((Process(1, "p", ""),), samples=(Sample("n", 0, object(), 1),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_trace(recording, path)
    assert path.read_text() == "before"
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"], "no half-written file is left"


SPAN = {"ph": "X", "name": "a", "ts": 0, "dur": 1, "pid": 1, "tid": 1}


@pytest.mark.parametrize(
    "bad",
    [
        SPAN | {"ph": "Z"},
        SPAN | {"dur": -1},
        SPAN | {"dur": None},
        SPAN | {"ts": "0"},
        SPAN | {"pid": "one"},
        SPAN | {"name": None},
        SPAN | {"args": [1]},
        SPAN | {"unknown": 1},
        {"ph": "C", "name": "n", "ts": 0, "pid": 1, "tid": 0, "args": {"value": "NaN"}},
        {"ph": "C", "name": "n", "ts": 0, "pid": 1, "tid": 0, "args": {}},
        {"ph": "i", "name": "n", "ts": 0, "pid": 1, "tid": 0, "s": "x"},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {}},
        {"ph": "M", "name": "other", "pid": 1, "tid": 0, "args": {"name": "x"}},
    ],
)
def test_the_schema_refuses_what_the_format_does_not_know(bad: dict[str, Any], validate: Any) -> None:
    validate({"traceEvents": [SPAN]})
    with pytest.raises(jsonschema.ValidationError):
        validate({"traceEvents": [bad]})


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "a", "ts": 10**400, "dur": 1, "pid": 1, "tid": 1},
        {"ph": "X", "name": "a", "ts": 1, "dur": 10**30, "pid": 1, "tid": 1},
        {"ph": "C", "name": "a", "ts": 1, "pid": 1, "args": {"value": 10**400}},
        {"ph": "X", "name": "a", "ts": 1e308, "dur": 1, "pid": 1, "tid": 1},
        {"ph": "X", "name": "a", "ts": 1, "dur": -1, "pid": float("inf"), "tid": 1},
    ],
)
def test_numbers_without_bound_are_refused_or_left_out(tmp_path: Path, event: dict[str, Any]):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([event]))
    if event["ph"] == "C":
        assert read_trace(path).samples == ()
    else:
        with pytest.raises(InvalidInputError, match="must be finite microseconds"):
            read_trace(path)
