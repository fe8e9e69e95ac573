from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import Recorder, Recording, summarise, summarise_recording
from mlsys_core.profiling.recording import Process
from mlsys_core.profiling.summary import format_s


def recorder_with(*spans: tuple[str, int, int], track: str = "t") -> Recorder:
    recorder = Recorder(clock_ns=lambda: 0)
    for name, start_ns, end_ns in spans:
        recorder.complete(name, start_ns, end_ns, track=track)
    return recorder


def test_self_time_is_total_less_what_is_nested_directly() -> None:
    recorder = recorder_with(
        ("step", 0, 100), ("forward", 10, 60), ("kernel", 20, 30), ("kernel", 40, 45), ("sample", 60, 90)
    )
    result = summarise_recording(recorder.recording())
    rows = {row.name: (round(row.duration_s.total * 1e9), round(row.self_s * 1e9)) for row in result.spans}
    assert rows == {"step": (100, 20), "forward": (50, 35), "kernel": (15, 15), "sample": (30, 30)}
    assert sum(own for _, own in rows.values()) == 100, "self times add up to the time covered"
    assert [row.name for row in result.spans] == ["step", "forward", "sample", "kernel"]
    assert result.spans[1].share_of_wall == pytest.approx(0.5)
    assert result.wall_s == pytest.approx(100e-9)


def test_spans_of_other_tracks_are_not_nested() -> None:
    recorder = recorder_with(("a", 0, 100))
    recorder.complete("b", 10, 20, track="elsewhere")
    rows = {row.name: round(row.self_s * 1e9) for row in summarise_recording(recorder.recording()).spans}
    assert rows == {"a": 100, "b": 10}


def test_overlapping_spans_of_one_name_nest_on_a_thread_but_not_on_a_named_track() -> None:
    def self_s(recorder: Recorder) -> float:
        (row,) = summarise_recording(recorder.recording()).spans
        return row.self_s

    requests = recorder_with(("request", 0, 10), ("request", 2, 8), track="requests")
    assert self_s(requests) == pytest.approx(16e-9)
    recursion = Recorder(clock_ns=lambda: 0)
    recursion.complete("visit", 2, 8)
    recursion.complete("visit", 0, 10)
    assert self_s(recursion) == pytest.approx(10e-9)


def test_spans_that_cross_keep_all_their_time() -> None:
    rows = summarise_recording(recorder_with(("a", 0, 10), ("b", 5, 15)).recording()).spans
    assert {row.name: round(row.self_s * 1e9) for row in rows} == {"a": 10, "b": 10}


def test_sorting() -> None:
    recording = recorder_with(
        ("many", 0, 1), ("many", 2, 3), ("many", 4, 5), ("long", 10, 20), ("wide", 30, 35), ("wide", 40, 48)
    ).recording()
    orders = {
        key: [row.name for row in summarise_recording(recording, sort=key).spans] for key in ("total", "count", "p99")
    }
    assert orders == {
        "total": ["wide", "long", "many"],
        "count": ["many", "wide", "long"],
        "p99": ["long", "wide", "many"],
    }
    with pytest.raises(InvalidInputError, match="choose one of total, count, p99"):
        summarise_recording(recording, sort="mean")  # type: ignore[arg-type]


def test_the_mean_of_a_counter_weighs_how_long_it_held() -> None:
    now = [0]
    recorder = Recorder(clock_ns=lambda: now[0])
    for at, value in ((0, 10.0), (90, 0.0), (95, math.nan)):
        now[0] = at
        recorder.count("queue", value)
    recorder.complete("run", 0, 100)
    (counter,) = summarise_recording(recorder.recording()).counters
    assert (counter.num_samples, counter.min, counter.max) == (2, 0.0, 10.0)
    assert counter.mean == pytest.approx(9.0)


def test_dropped_events_are_told() -> None:
    recorder = Recorder(max_events=1)
    assert summarise_recording(recorder.recording()).warning() == ""
    for value in range(3):
        recorder.count("n", value)
    result = summarise_recording(recorder.recording())
    assert result.dropped == 2
    assert result.warning().startswith("dropped events: 2,")


def test_an_empty_recording() -> None:
    result = summarise_recording(Recording((Process(1, "mlsys", ""),)))
    assert (result.wall_s, result.num_events, result.spans, result.counters) == (0.0, 0, (), ())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (4.2e-8, "42 ns"),
        (1e-6, "1 µs"),
        (0.0012345, "1.23 ms"),
        (0.1234, "123 ms"),
        (90, "90 s"),
        (12345, "12345 s"),
    ],
)
def test_format(seconds: float, text: str) -> None:
    assert format_s(seconds) == text


def test_known_values() -> None:
    d = summarise(range(1, 102))  # 1..101: the q-th percentile is 1 + q
    assert (d.count, d.total, d.mean, d.min, d.p50, d.p90, d.p99, d.max) == (101, 5151, 51, 1, 51, 91, 100, 101)
    assert d.std == pytest.approx(math.sqrt((101**2 - 1) / 12))


def test_percentiles_interpolate_between_neighbours() -> None:
    d = summarise([0.0, 10.0])
    assert (d.p50, d.p90, d.p99) == pytest.approx((5.0, 9.0, 9.9))


def test_one_value_is_all_of_them() -> None:
    d = summarise(np.array([3.5], dtype=np.float32))
    assert {d.mean, d.min, d.p50, d.p90, d.p99, d.max, d.total} == {3.5}
    assert d.std == 0


def test_no_values() -> None:
    d = summarise([])
    assert (d.count, d.total) == (0, 0)
    assert math.isnan(d.p99)
    assert d.to_dict() == {
        "count": 0, "total": 0.0, "mean": None, "std": None, "min": None,
        "p50": None, "p90": None, "p99": None, "max": None,
    }  # fmt: skip


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_order_of_the_figures(values: list[float]) -> None:
    d = summarise(values)
    slack = 1e-6
    assert d.min <= d.p50 <= d.p90 + slack <= d.p99 + 2 * slack <= d.max + 3 * slack
    assert d.min - slack <= d.mean <= d.max + slack


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(InvalidInputError, match=r"values\[1\] is (nan|inf|-inf)"):
        summarise([1.0, value])


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"shape \(2, 2\)"):
        summarise(np.ones((2, 2)))
