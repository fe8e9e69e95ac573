"""A CUDA worker's additions to core's stream executor, and the whole engine on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.sequence import seq2seq_model
from mlsys_batchmaker.scheduling.tasks import RoundOutput
from mlsys_batchmaker.workers.cuda import CounterSignal, RoundTimes, counter_or_events, cuda_graph
from mlsys_core.device import get_device
from mlsys_core.errors import DeviceError
from mlsys_core.loop import EventSignal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_round_begins_when_the_one_before_ends():
    times = RoundTimes()
    first = times(RoundOutput([], 1.0, 1.0), 3.0)
    second = times(RoundOutput([], 1.5, 1.5), 4.0)
    assert [(each.started_s, each.ended_s) for each in (first, second)] == [(1.0, 3.0), (3.0, 4.0)]


def test_a_counter_needs_memory_that_can_be_pinned_else_events_tell():
    device = get_device("cpu")
    with device.stream() as stream:
        signal = counter_or_events(device, stream)
        signal.record(stream)
        stream.synchronize()
        assert isinstance(signal, CounterSignal if torch.cuda.is_available() else EventSignal)
        assert signal.num_done() == 1


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
