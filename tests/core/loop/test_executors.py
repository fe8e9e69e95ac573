from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from mlsys_core.device import get_device
from mlsys_core.device.cpu import CpuDevice
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import EventSignal, InlineExecutor, StreamExecutor, ThreadExecutor, WallClock

from tests.processes import FAULT_S, until


def fail_on_odd(batch: int) -> int:
    if batch % 2:
        raise ValueError(f"odd: {batch}")
    return batch * 10


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_batches_complete_in_order_with_output_or_error(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd, max_in_flight=4)
    try:
        for batch in (2, 3, 4):
            executor.submit(batch)
        assert executor.wait(None) == (2, 20)
        done = executor.wait(None)
        assert done is not None
        assert done[0] == 3
        assert isinstance(done[1], ValueError)
        assert executor.wait(None) == (4, 40)
        assert executor.wait(0.0) is None
    finally:
        executor.close()


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_interrupt_ends_a_wait_in_progress_and_the_next_one(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd)
    try:
        executor.interrupt()
        assert executor.wait(None) is None
        timer = threading.Timer(0.02, executor.interrupt)
        timer.start()
        assert executor.wait(None) is None  # would block for ever without the interrupt
        timer.join()
    finally:
        executor.close()


@pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])
def test_closed_executors_take_nothing_and_close_again(make: Callable[..., ThreadExecutor[int, int]]) -> None:
    executor = make(fail_on_odd)
    executor.close()
    executor.close()
    with pytest.raises(ServingError, match="closed"):
        executor.submit(2)
    with pytest.raises(InvalidInputError, match="max_in_flight=0"):
        make(fail_on_odd, max_in_flight=0)


def test_inline_runs_in_the_waiting_thread_and_lets_ctrl_c_through() -> None:
    executor = InlineExecutor[None, int](lambda _: threading.get_ident())
    executor.submit(None)
    assert executor.wait(None) == (None, threading.get_ident())

    def interrupted(_: None) -> None:
        raise KeyboardInterrupt

    executor_of_ctrl_c = InlineExecutor[None, None](interrupted)
    executor_of_ctrl_c.submit(None)
    with pytest.raises(KeyboardInterrupt):
        executor_of_ctrl_c.wait(None)


def test_thread_runs_all_on_one_other_thread() -> None:
    with ThreadExecutor[int, int](lambda _: threading.get_ident(), max_in_flight=3) as executor:
        for batch in range(3):
            executor.submit(batch)
        idents = {output for _, output in (executor.wait(None) or (0, None) for _ in range(3))}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_thread_survives_a_batch_that_exits() -> None:
    def leave(batch: int) -> int:
        if batch == 0:
            raise SystemExit(3)
        return batch

    with ThreadExecutor(leave, max_in_flight=2) as executor:
        executor.submit(0)
        executor.submit(1)
        done = executor.wait(None)
        assert done is not None
        assert isinstance(done[1], SystemExit)
        assert executor.wait(None) == (1, 1)


def test_close_finishes_the_running_batch_and_drops_the_rest() -> None:
    started, release, ran = threading.Event(), threading.Event(), []

    def work(batch: int) -> int:
        started.set()
        release.wait()
        ran.append(batch)
        return batch

    executor = ThreadExecutor(work, max_in_flight=2, close_timeout_s=FAULT_S)
    executor.submit(1)
    executor.submit(2)
    assert started.wait()
    releasing = threading.Thread(target=lambda: (until(lambda: executor._closed), release.set()))
    releasing.start()
    executor.close()
    releasing.join()
    assert ran == [1]
    assert not any(thread.name == "executor" and thread.is_alive() for thread in threading.enumerate())


def test_close_gives_up_on_a_batch_that_hangs() -> None:
    release = threading.Event()
    executor = ThreadExecutor[None, bool](lambda _: release.wait(), close_timeout_s=0.01, name="hangs")
    executor.submit(None)
    executor.close()
    assert not release.is_set()  # close came back although the batch has not
    release.set()
    until(lambda: not any(thread.name == "hangs" for thread in threading.enumerate()))


class Recorded:
    """A stream and its signal: runs what is submitted at once, as CUDA launches; ``done`` of it is over."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.signals: list[int] = []
        self.done = 0
        self.is_closed = self.is_broken = False

    def stream(self) -> Recorded:
        return self

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        if not self.is_broken:
            fn(*args)

    def record(self, _: object) -> None:
        self.issued.append("signal")
        self.signals.append(len(self.issued))

    def num_done(self) -> int:
        return sum(signal <= self.done for signal in self.signals)

    def close(self) -> None:
        self.is_closed = True


def executor(device: Recorded, **options: object) -> StreamExecutor[int, str]:
    def issue(batch: int) -> str:
        if batch == 9:
            raise ValueError("no kernel")
        device.issued.append(f"kernels of {batch}")
        return f"output of {batch}"

    return StreamExecutor(issue, device, WallClock(), max_in_flight=5, signal=lambda stream: device, **options)


def test_batches_are_issued_at_once_and_come_back_in_order() -> None:
    device = Recorded()
    worker = executor(device)
    for batch in range(3):
        worker.submit(batch)
    assert device.issued == ["kernels of 0", "signal", "kernels of 1", "signal", "kernels of 2", "signal"]
    assert worker.wait(0.0) is None
    device.done = 4  # two signals: the first two batches
    assert [worker.wait(0.0) for _ in range(3)] == [(0, "output of 0"), (1, "output of 1"), None]
    device.done = 6
    assert worker.wait(0.0) == (2, "output of 2")
    worker.close()
    assert device.is_closed


def test_an_error_of_issuing_comes_back_in_its_turn() -> None:
    device = Recorded()
    worker = executor(device)
    worker.submit(0)
    worker.submit(9)
    device.done = 9
    assert worker.wait(0.0) == (0, "output of 0")
    batch, error = worker.wait(0.0)
    assert batch == 9
    assert isinstance(error, ValueError)


def test_a_batch_that_the_stream_skipped_is_an_error_and_not_a_hang() -> None:
    device = Recorded()
    worker = executor(device)
    device.is_broken = True
    worker.submit(0)
    device.done = 9
    assert isinstance(worker.wait(0.0)[1], ServingError)


def test_an_output_is_finished_with_the_time_it_was_seen() -> None:
    device = Recorded()
    worker = executor(device, finish=lambda output, now: f"{output} at {now > 0}")
    worker.submit(0)
    worker.submit(9)
    device.done = 9
    assert worker.wait(0.0) == (0, "output of 0 at True")
    assert isinstance(worker.wait(0.0)[1], ValueError), "an error is left alone"


def test_an_interrupt_ends_a_wait() -> None:
    worker = executor(Recorded())
    timer = threading.Timer(0.05, worker.interrupt)
    timer.start()
    assert worker.wait(None) is None
    timer.join()


def test_on_threads_of_the_cpu_too() -> None:
    """There the stream's own thread runs a batch, and events tell when it has."""
    gate, seen = threading.Event(), []

    def issue(batch: int) -> int:
        gate.wait(FAULT_S)
        seen.append(threading.current_thread().name)
        return batch * 2

    worker = StreamExecutor(issue, get_device("cpu"), WallClock(), max_in_flight=2)
    worker.submit(1)
    worker.submit(2)
    assert worker.wait(0.0) is None
    gate.set()
    assert [worker.wait(FAULT_S) for _ in range(2)] == [(1, 2), (2, 4)]
    worker.close()
    assert set(seen) == {"mlsys-cpu-stream-0"}


def test_events_are_asked_in_order() -> None:
    device = CpuDevice()
    first, second = threading.Event(), threading.Event()
    with device.stream() as one, device.stream() as other:
        signal = EventSignal(device)
        for stream, gate in ((one, first), (other, second), (one, first)):
            stream.submit(gate.wait, FAULT_S)
            signal.record(stream)
        second.set()
        other.synchronize()
        assert signal.num_done() == 0  # the first is not
        first.set()
        one.synchronize()
        assert signal.num_done() == 3


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_of_the_cpu_is_left_after_its_work_or_a_while(is_late: bool) -> None:
    gate, ran = threading.Event(), []
    stream = CpuDevice().stream(name="left")
    stream.submit(gate.wait, FAULT_S)
    stream.submit(ran.append, 1)
    if not is_late:
        gate.set()
    stream.leave(0.01 if is_late else FAULT_S)
    assert ran == ([] if is_late else [1])
    gate.set()
    stream.close()
    assert ran == [1]
