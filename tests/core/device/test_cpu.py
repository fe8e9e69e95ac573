"""The CPU device: threads, pinning, spinning, and the order of any program of submits, records and waits."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.device import CpuDevice, Event
from mlsys_core.errors import DeviceError, InvalidInputError
from mlsys_core.posix.machine import allowed_cores

HAS_AFFINITY = hasattr(os, "sched_setaffinity")


def eventually(condition: Callable[[], bool]) -> bool:
    while not condition():
        time.sleep(0.005)
    return True


NUM_STREAMS, NUM_EVENTS = 3, 3
ops = st.one_of(
    st.tuples(st.just("work"), st.integers(0, NUM_STREAMS - 1), st.sampled_from([0.0, 0.001])),
    st.tuples(st.just("record"), st.integers(0, NUM_STREAMS - 1), st.integers(0, NUM_EVENTS - 1)),
    st.tuples(st.just("wait"), st.integers(0, NUM_STREAMS - 1), st.integers(0, NUM_EVENTS - 1)),
)


def required_order(program: list[tuple[str, int, float]]) -> dict[int, frozenset[int]]:
    """For each piece of work (by its index in the program), all work that must come before it."""
    done_in_stream = [frozenset[int]()] * NUM_STREAMS
    captured = [frozenset[int]()] * NUM_EVENTS
    before: dict[int, frozenset[int]] = {}
    for index, (kind, stream, operand) in enumerate(program):
        if kind == "work":
            before[index] = done_in_stream[stream]
            done_in_stream[stream] |= {index}
        elif kind == "record":
            captured[int(operand)] = done_in_stream[stream]
        else:
            done_in_stream[stream] |= captured[int(operand)]
    return before


@settings(max_examples=60)
@given(program=st.lists(ops, max_size=40), spin_s=st.sampled_from([0.0, 30e-6]))
def test_any_program_keeps_the_order_its_events_require(program: list[tuple[str, int, float]], spin_s: float) -> None:
    device, begin = CpuDevice(spin_s=spin_s), threading.Event()
    started: list[int] = []
    finished_at_start: dict[int, set[int]] = {}
    finished: set[int] = set()

    def work(index: int, duration_s: float) -> None:
        finished_at_start[index] = finished.copy()
        started.append(index)
        if duration_s:
            time.sleep(duration_s)
        finished.add(index)

    streams = [device.stream() for _ in range(NUM_STREAMS)]
    events: list[Event] = [device.event() for _ in range(NUM_EVENTS)]
    for stream_ in streams:
        stream_.submit(
            begin.wait, 20
        )  # all queues full before any work runs: order comes from the events, not from luck
    for index, (kind, stream, operand) in enumerate(program):
        if kind == "work":
            streams[stream].submit(work, index, operand)
        elif kind == "record":
            streams[stream].record(events[int(operand)])
        else:
            streams[stream].wait(events[int(operand)])
    begin.set()
    device.synchronize()
    assert all(event.query() for event in events)
    for stream_ in streams:
        stream_.close()
    before = required_order(program)
    assert sorted(started) == sorted(before)  # each piece of work ran once
    for index, required in before.items():
        assert required <= finished_at_start[index]


def test_work_of_two_streams_can_meet() -> None:
    device, meeting = CpuDevice(), threading.Barrier(2)
    with device.stream() as first, device.stream() as second:
        first.submit(meeting.wait)
        second.submit(meeting.wait)
        device.synchronize()  # raises BrokenBarrierError if they ran one after the other


def test_work_runs_on_the_streams_own_thread() -> None:
    seen: list[int] = []
    with CpuDevice().stream() as stream:
        for _ in range(3):
            stream.submit(lambda: seen.append(threading.get_ident()))
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


@pytest.mark.skipif(not HAS_AFFINITY, reason="this platform cannot pin threads")
def test_a_pinned_stream_runs_on_its_core_and_leaves_others_alone() -> None:
    cores = sorted(allowed_cores() or ())
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    device = CpuDevice()
    with device.stream(core=cores[-1]) as pinned, device.stream() as free:
        pinned.submit(lambda: seen.append(os.sched_getaffinity(0)))
        pinned.synchronize()
        free.submit(lambda: seen.append(os.sched_getaffinity(0)))
    assert seen == [{cores[-1]}, before]
    assert pinned.core == cores[-1]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not HAS_AFFINITY, reason="this platform cannot pin threads")
def test_a_core_not_open_to_the_process_is_refused_before_a_thread_starts() -> None:
    num_threads = threading.active_count()
    with pytest.raises(InvalidInputError, match="core 100000 is not open to this process: allowed are"):
        CpuDevice().stream(core=100_000)
    assert threading.active_count() == num_threads


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("spin_s", [0.0, 30e-6])
def test_an_idle_worker_blocks(spin_s: float) -> None:
    ids: list[int] = []
    with CpuDevice(spin_s=spin_s).stream() as stream:
        stream.submit(lambda: ids.append(threading.get_native_id()))
        stream.synchronize()

        def ran_meanwhile() -> bool:
            status = Path(f"/proc/self/task/{ids[0]}/schedstat")
            before = status.read_text()  # time on the processor, time waiting for it, turns
            time.sleep(0.05)
            return status.read_text() != before

        assert eventually(lambda: not ran_meanwhile())


def test_a_stream_wakes_from_blocking() -> None:
    seen: list[int] = []
    with CpuDevice(spin_s=0).stream() as stream:
        for value in range(20):
            time.sleep(0.001)  # long enough for the worker to block
            stream.submit(seen.append, value)
            stream.synchronize()
            assert seen[-1] == value


def test_several_threads_may_submit_to_one_stream() -> None:
    seen: list[tuple[int, int]] = []
    with CpuDevice().stream() as stream:

        def submit_all(who: int) -> None:
            for value in range(200):
                stream.submit(seen.append, (who, value))

        threads = [threading.Thread(target=submit_all, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for who in range(4):
        assert [value for owner, value in seen if owner == who] == list(range(200))


def test_even_an_exit_inside_work_reaches_the_caller_and_spares_the_thread() -> None:
    seen: list[int] = []
    with CpuDevice().stream() as stream:
        stream.submit(sys.exit, 3)
        with pytest.raises(SystemExit):
            stream.synchronize()
        stream.submit(seen.append, 1)
    assert seen == [1]


@pytest.mark.parametrize("act", ["synchronize", "close"])
def test_work_must_not_wait_for_its_own_stream(act: str) -> None:
    stream = CpuDevice().stream()
    stream.submit(getattr(stream, act))
    with pytest.raises(DeviceError, match="would wait for itself"):
        stream.close()


def test_timing_uses_the_clock_given() -> None:
    ticks = iter([10.0, 10.25])
    device = CpuDevice(clock=lambda: next(ticks))
    start, end, untimed = device.event(timing=True), device.event(timing=True), device.event()
    with device.stream() as stream:
        stream.record(start)
        stream.record(untimed)
        stream.record(end)
    assert start.elapsed_ms(end) == 250.0
    assert end.elapsed_ms(start) == -250.0


def test_a_stream_nobody_holds_finishes_its_work_and_its_thread_ends() -> None:
    seen: list[int] = []
    before = set(threading.enumerate())
    stream = CpuDevice().stream()
    stream.submit(time.sleep, 0.01)
    stream.submit(seen.append, 1)
    (thread,) = set(threading.enumerate()) - before
    del stream
    gc.collect()
    thread.join()
    assert not thread.is_alive()
    assert seen == [1]


def test_closing_leaves_no_thread() -> None:
    num_threads = threading.active_count()
    with CpuDevice().stream() as stream:
        assert threading.active_count() == num_threads + 1
        stream.submit(int)
    assert threading.active_count() == num_threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stream_taken_over_a_fork_says_so_instead_of_hanging() -> None:
    with CpuDevice().stream() as stream:
        stream.submit(int)
        stream.synchronize()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                stream.synchronize()
            except DeviceError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("index", [1, -1])
def test_there_is_one_cpu_device(index: int) -> None:
    with pytest.raises(InvalidInputError, match=f"cpu:{index} does not exist"):
        CpuDevice(index)


@pytest.mark.parametrize("spin_s", [-1e-6, float("nan"), float("inf")])
def test_a_senseless_spin_is_refused(spin_s: float) -> None:
    with pytest.raises(InvalidInputError, match="spin_s is"):
        CpuDevice(spin_s=spin_s)
