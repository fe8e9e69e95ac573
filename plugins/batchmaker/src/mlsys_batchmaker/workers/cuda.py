"""CUDA: completion reported by a counter in pinned memory, results copied without waiting, cells as graphs (section 5).

Core's :class:`~mlsys_core.loop.StreamExecutor` issues a round's kernels to one stream and a signal behind them, and
polls the signal. Rounds come back first in, first out, so a count of k means that the first k are done. No callbacks:
they would hold up the stream's kernels while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from mlsys_batchmaker.scheduling.tasks import RoundOutput
from mlsys_core.device import CudaDevice, Device, Stream
from mlsys_core.device.cuda_graphs import active, capturing
from mlsys_core.errors import DeviceError
from mlsys_core.loop import EventSignal, Signal
from torch import Tensor, nn


class CounterSignal:
    """A number on the device, raised by one in stream order and copied to pinned host memory behind it.

    Args:
        device: a CUDA device.
        stream: stream of the device that the signals are for.

    Raises:
        RuntimeError: host memory cannot be pinned.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = self._on_host.numpy()
        self._on_device = torch.zeros(0)
        stream.submit(self._begin, device.torch_name)

    def record(self, stream: Stream) -> None:
        """See :class:`~mlsys_core.loop.executors.Signal`."""
        stream.submit(self._count)

    def num_done(self) -> int:
        """See :class:`~mlsys_core.loop.executors.Signal`."""
        return int(self._seen[0])

    def _begin(self, device: str) -> None:
        self._on_device = torch.zeros(1, dtype=torch.int64, device=device)

    def _count(self) -> None:
        self._on_device.add_(1)
        self._on_host.copy_(self._on_device, non_blocking=True)


def counter_or_events(device: Device, stream: Stream) -> Signal:
    """Return a counter, or events where pinned memory cannot be had."""
    try:
        return CounterSignal(device, stream)
    except RuntimeError:
        return EventSignal(device)


class RoundTimes:
    """Times when rounds that were issued ahead began and ended: one begins when the one before ends."""

    def __init__(self) -> None:
        self._last_end_s = 0.0

    def __call__(self, output: RoundOutput, ended_s: float) -> RoundOutput:
        """Return ``output`` with its times."""
        began_s, self._last_end_s = max(output.started_s, self._last_end_s), ended_s
        return replace(output, started_s=began_s, ended_s=ended_s)


def to_pinned(values: Tensor) -> Tensor:
    """Copy values to the host; the copy is valid when the stream gets there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def cuda_graph(module: nn.Module, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile one batch size of a module into a CUDA graph over inputs of its own.

    Raises:
        DeviceError: the inputs are not on a CUDA device.
    """
    if not example_inputs or example_inputs[0].device.type != "cuda":
        raise DeviceError("a CUDA graph needs its inputs on a CUDA device")
    device = CudaDevice(example_inputs[0].device.index or 0)
    inputs = [value.clone() for value in example_inputs]
    current, begun, warm = device.current_stream(), device.event(), device.event()
    with device.stream() as stream:
        current.record(begun)
        stream.wait(begun)
        with torch.inference_mode(), active(stream):
            for _ in range(3):  # libraries choose their kernels and take their memory before the capture
                module(*inputs)
        stream.record(warm)
        current.wait(warm)
    with torch.inference_mode(), capturing() as graph:
        outputs = module(*inputs)

    def replay(*values: Tensor) -> Any:
        for own, value in zip(inputs, values, strict=True):
            own.copy_(value, non_blocking=True)
        graph.replay()
        return outputs

    return replay
