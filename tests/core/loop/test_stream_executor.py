"""The stream executor: on a stream that is a list, so that the device does as much as the test says, and on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from mlsys_core.device import get_device
from mlsys_core.device.cpu import CpuDevice
from mlsys_core.errors import ServingError
from mlsys_core.loop import EventSignal, StreamExecutor, WallClock

from tests.processes import FAULT_S


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
