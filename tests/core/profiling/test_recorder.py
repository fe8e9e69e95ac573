from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import NULL_RECORDER, Recorder
from mlsys_core.profiling.recording import Instant, Sample
from mlsys_core.profiling.spans import RawEvent, ThreadBuffer


def test_spans_nest_and_keep_their_arguments(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    with recorder.span("outer", request="7") as outer:
        clock.advance(10)
        with recorder.span("inner"):
            clock.advance(5)
        outer.note(tokens=12)
        clock.advance(1)
    spans = recorder.recording().spans
    assert [(s.name, s.start_ns, s.end_ns, s.args) for s in spans] == [
        ("outer", 0, 16, {"request": "7", "tokens": 12}),
        ("inner", 10, 15, None),
    ]


def test_a_span_stands_before_what_it_contains_even_if_no_time_passes(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    with recorder.span("outer"), recorder.span("middle"), recorder.span("inner"):
        pass
    assert [span.name for span in recorder.recording().spans] == ["outer", "middle", "inner"]


def test_a_spanner_may_be_entered_within_itself(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    visit = recorder.spanner("visit", kind="tree")

    def walk(depth: int) -> None:
        with visit:
            clock.advance(1)
            if depth:
                walk(depth - 1)
            clock.advance(1)

    walk(2)
    spans = recorder.recording().spans
    assert [(s.start_ns, s.end_ns) for s in spans] == [(0, 6), (1, 5), (2, 4)]
    assert all(span.args == {"kind": "tree"} for span in spans)


@pytest.mark.parametrize("form", ["span", "spanner"])
def test_exceptions_pass_and_are_named(form: str, clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    context = getattr(recorder, form)("step", size=3)
    with pytest.raises(ZeroDivisionError), context:
        1 / 0  # noqa: B018
    assert recorder.recording().spans[0].args == {"size": 3, "error": "ZeroDivisionError"}
    if form == "spanner":
        clock.advance(1)
        with context:
            pass
        assert recorder.recording().spans[1].args == {"size": 3}, "the error belongs to one span only"


def test_counters_instants_and_complete_spans(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    clock.advance(3)
    recorder.count("queue", 5)
    recorder.instant("preempted", request="7")
    recorder.complete("request", 1, 9, track="requests", request="7")
    recording = recorder.recording()
    pid = recording.processes[0].pid
    assert recording.samples == (Sample("queue", 3, 5, pid),)
    assert [(i.name, i.at_ns, i.args) for i in recording.instants] == [("preempted", 3, {"request": "7"})]
    (span,) = recording.spans
    assert (span.start_ns, span.end_ns, span.track.name, span.args) == (1, 9, "requests", {"request": "7"})
    with pytest.raises(InvalidInputError, match="ends at 1 ns, before its start at 2 ns"):
        recorder.complete("request", 2, 1)


def test_each_thread_has_its_own_track_with_its_name(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    step = recorder.spanner("step")
    inside = threading.Barrier(3)

    def work() -> None:
        with step:
            inside.wait()  # all three are in the same spanner at once

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.recording().spans
    assert sorted(span.track.name for span in spans) == ["worker-0", "worker-1", "worker-2"]
    assert len({span.track.tid for span in spans}) == 3


def test_snapshots_while_other_threads_record() -> None:
    recorder = Recorder(max_events=64)
    stop = threading.Event()
    recorded: list[int] = []

    def work() -> None:
        step, count = recorder.spanner("step"), 0
        while not stop.is_set() or count < 200:
            with step:
                count += 1
        recorded.append(count)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    seen = dropped = 0
    for _ in range(50):
        recording = recorder.recording(clear=True)
        seen, dropped = seen + len(recording.spans), dropped + recording.dropped
    stop.set()
    for thread in threads:
        thread.join()
    recording = recorder.recording(clear=True)
    assert seen + len(recording.spans) + dropped + recording.dropped == sum(recorded), "each span is seen or counted"


def test_interleaved_tasks_keep_their_own_times(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)

    async def request(name: str, first_ns: int, second_ns: int) -> None:
        with recorder.span(name):
            clock.advance(first_ns)
            await asyncio.sleep(0)
            clock.advance(second_ns)

    async def both() -> None:
        await asyncio.gather(request("a", 1, 10), request("b", 2, 20))

    asyncio.run(both())
    assert [(s.name, s.start_ns, s.end_ns) for s in recorder.recording().spans] == [("a", 0, 13), ("b", 1, 33)]


def test_a_full_buffer_drops_the_oldest_and_counts_them(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, max_events=3)
    for value in range(10):
        recorder.count("n", value)
    recording = recorder.recording()
    assert [sample.value for sample in recording.samples] == [7, 8, 9]
    assert recording.dropped == 7
    assert recorder.recording().dropped == 7, "a look changes nothing"


def test_clear_hands_out_each_event_once(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, max_events=3)
    for value in range(5):
        recorder.count("n", value)
    assert recorder.recording(clear=True).dropped == 2
    recorder.count("n", 5)
    recording = recorder.recording(clear=True)
    assert [sample.value for sample in recording.samples] == [5]
    assert recording.dropped == 0
    assert recorder.recording().num_events == 0


def run_in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_buffers_of_finished_threads_are_bounded(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, max_threads=3)  # this thread's, which runs on, and two more
    for value in range(5):
        run_in_thread(lambda value=value: recorder.count("n", value))
    recording = recorder.recording()
    assert [sample.value for sample in recording.samples] == [3, 4]
    assert recording.dropped == 3


def test_a_finished_thread_is_forgotten_once_its_events_are_handed_out(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, max_threads=2)
    for value in range(5):
        run_in_thread(lambda value=value: recorder.count("n", value))
        recording = recorder.recording(clear=True)
        assert [sample.value for sample in recording.samples] == [value]
        assert recording.dropped == 0


def test_nothing_of_a_finished_thread_is_kept_after_that(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    thread = threading.Thread(target=recorder.instant, args=("here",))
    thread.start()
    thread.join()
    alive = weakref.ref(thread)
    del thread
    assert recorder.recording().num_events == 1
    assert alive() is not None
    recorder.recording(clear=True)
    gc.collect()
    assert alive() is None


def test_taking_a_buffer_between_an_events_two_appends_loses_neither() -> None:
    buffer = ThreadBuffer(10)
    event: RawEvent = (0, "i", "mark", 5, None, None, True)
    buffer.events.append({"request": "7"})
    assert buffer.snapshot() == ([], 0)
    assert buffer.take() == ([], 0)
    buffer.events.append(event)
    assert buffer.take() == ([(event, {"request": "7"})], 0)


def test_arguments_go_to_the_event_that_has_some() -> None:
    buffer = ThreadBuffer(10)
    handler: RawEvent = (0, "i", "signal", 5, None, None, False)  # recorded in between, by a signal handler
    event: RawEvent = (1, "i", "mark", 4, None, None, True)
    buffer.events.extend([{"request": "7"}, handler, event])
    assert buffer.snapshot() == ([(handler, None), (event, {"request": "7"})], 0)


def test_events_on_named_tracks_share_a_track_in_every_recording(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    recorder.instant("a", track="requests")
    first = recorder.recording(clear=True).instants[0].track
    recorder.instant("b", track="others")
    recorder.instant("c", track="requests")
    tracks = {instant.name: instant.track for instant in recorder.recording().instants}
    assert tracks["c"] == first
    assert tracks["b"] != first


def test_the_disabled_recorder_does_nothing_in_every_form() -> None:
    with NULL_RECORDER.span("a", request="7") as span:
        span.note(tokens=1)
    step = NULL_RECORDER.spanner("b")
    for _ in range(3):
        with step as entered, step:
            assert entered is step
    NULL_RECORDER.count("c", 1)
    NULL_RECORDER.instant("d")
    NULL_RECORDER.complete("e", 1, 2)
    assert NULL_RECORDER.recording().num_events == 0
    assert not NULL_RECORDER.enabled


def test_the_disabled_span_lets_exceptions_pass_and_stays_usable() -> None:
    step = Recorder(enabled=False).spanner("step")
    for _ in range(2):
        with pytest.raises(ValueError, match="kept"), step:
            raise ValueError("kept")
        with step:
            pass


@pytest.mark.parametrize("limits", [{"max_events": 0}, {"max_threads": 0}])
def test_bad_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="=0: a recorder keeps at least 1"):
        Recorder(**limits)  # type: ignore[arg-type]


def test_reserved_words_are_free_for_arguments(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock)
    recorder.instant("reloaded", name="model-a", value=3)
    (instant,) = recorder.recording().instants
    assert isinstance(instant, Instant)
    assert instant.args == {"name": "model-a", "value": 3}
