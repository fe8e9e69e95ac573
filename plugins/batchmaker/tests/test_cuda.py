"""The CUDA executor with a stream that is a list, and on a GPU where there is one."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from mlsys_batchmaker.cuda import CudaExecutor, EventSignal, cuda_graph
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.sequence import seq2seq_model
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_core.errors import DeviceError
from mlsys_core.serving import WallClock, WorkerId

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Stream:
    """Records what is issued; ``run(n)`` lets the device do the first n of it."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.done = 0
        self.signals: list[int] = []

    def record(self) -> None:
        self.issued.append("signal")
        self.signals.append(len(self.issued))

    def num_done(self) -> int:
        return sum(place <= self.done for place in self.signals)


def executor(stream: Stream) -> CudaExecutor:
    def issue(batch: Round) -> RoundOutput:
        if batch.worker == 9:
            raise ValueError("no kernel")
        stream.issued.append(f"kernels of {batch.worker}")
        return RoundOutput([], 0.0, 0.0)

    return CudaExecutor(issue, stream, WallClock(), max_in_flight=5, in_stream=contextlib.nullcontext)


def test_rounds_are_issued_at_once_and_come_back_in_order():
    stream = Stream()
    worker = executor(stream)
    rounds = [Round(WorkerId(number), ()) for number in range(3)]
    for each in rounds:
        worker.submit(each)
    assert stream.issued == ["kernels of 0", "signal", "kernels of 1", "signal", "kernels of 2", "signal"]
    assert worker.wait(0.0) is None
    stream.done = 4  # two signals: the first two rounds
    assert [worker.wait(0.0)[0] for _ in range(2)] == rounds[:2]
    assert worker.wait(0.0) is None
    stream.done = 6
    assert worker.wait(0.0)[0] is rounds[2]


def test_what_issuing_raises_comes_back_in_its_turn():
    stream = Stream()
    worker = executor(stream)
    worker.submit(Round(WorkerId(0), ()))
    worker.submit(Round(WorkerId(9), ()))
    stream.done = 9
    assert isinstance(worker.wait(0.0)[1], RoundOutput)
    assert isinstance(worker.wait(0.0)[1], ValueError)


def test_an_interrupt_ends_a_wait():
    worker = executor(Stream())
    timer = threading.Timer(0.05, worker.interrupt)
    timer.start()
    assert worker.wait(None) is None
    timer.join()


def test_events_are_asked_in_order():
    made: list[Event] = []

    class Event:
        def __init__(self) -> None:
            self.is_done = False
            made.append(self)

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.is_done

    signal = EventSignal(Event)
    for _ in range(3):
        signal.record()
    made[1].is_done = True
    assert signal.num_done() == 0  # the first is not
    made[0].is_done = True
    assert signal.num_done() == 2


def test_a_graph_needs_a_device():
    with pytest.raises(DeviceError, match="CUDA device"):
        cuda_graph(torch.nn.Linear(2, 2), [torch.zeros(1, 2)])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunks", ["cell", "chunk"])
def test_a_gpu_says_the_same_words(chunks: str):
    requests = [{"words": np.arange(length) % 9} for length in (1, 5, 12)]
    words = []
    for device in ("cpu", "cuda"):
        model = seq2seq_model(num_words=9, hidden_size=32, eos=None)
        with Engine(model, EngineConfig(device=device, executor=chunks)) as engine:
            futures = [engine.submit(request) for request in requests]
            words.append([future.result().outputs["words"].tolist() for future in futures])
    assert words[0] == words[1]
