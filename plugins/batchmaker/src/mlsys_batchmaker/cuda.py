"""CUDA: tasks issued without waiting, completion told by a counter in pinned memory, cells as CUDA graphs (section 5).

:class:`CudaExecutor` is what core's loop sees of a CUDA worker: ``submit`` issues a round's kernels to one stream and a
signal behind them, ``wait`` polls the signal. Its in-progress queue is first in, first out, so a count of k means that
the first k rounds are done. No callbacks: they would hold up the stream's kernels while they run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from mlsys_core.errors import DeviceError
from mlsys_core.serving import Clock
from torch import Tensor, nn

from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput

_POLL_S = 20e-6


class Signal(Protocol):
    """Counts how much of what was issued to a stream is done."""

    def record(self) -> None:
        """Issue a signal behind all issued so far."""
        ...

    def num_done(self) -> int:
        """Signals that have been reached, in order; does not wait."""
        ...


class CounterSignal:
    """A number on the device, raised by one in stream order and copied to pinned host memory behind it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.zeros(1, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = self._on_host.numpy()

    def record(self) -> None:
        """See :class:`Signal`."""
        self._on_device.add_(1)
        self._on_host.copy_(self._on_device, non_blocking=True)

    def num_done(self) -> int:
        """See :class:`Signal`."""
        return int(self._seen[0])


class EventSignal:
    """Events, asked one by one: where host memory cannot be pinned.

    Args:
        make_event: of the stream's device, with ``record`` and ``query``.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._events: deque[Any] = deque()
        self._num_done = 0

    def record(self) -> None:
        """See :class:`Signal`."""
        event = self._make_event()
        event.record()
        self._events.append(event)

    def num_done(self) -> int:
        """See :class:`Signal`."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._num_done += 1
        return self._num_done


def make_signal(device: torch.device) -> Signal:
    """A counter, or events where pinned memory cannot be had."""
    try:
        return CounterSignal(device)
    except RuntimeError:
        return EventSignal()


class CudaExecutor:
    """An executor of core's loop that issues and polls; see the module.

    Args:
        issue: a :class:`~mlsys_batchmaker.worker.Worker` whose results become valid when its kernels are done.
        signal: of the stream that ``issue`` runs on.
        clock: the loop's.
        max_in_flight: rounds.
        in_stream: makes the context in which kernels are issued, such as ``lambda: torch.cuda.stream(stream)``.
    """

    def __init__(
        self,
        issue: Callable[[Round], RoundOutput],
        signal: Signal,
        clock: Clock,
        *,
        max_in_flight: int,
        in_stream: Callable[[], Any],
    ) -> None:
        self.max_in_flight = max_in_flight
        self._issue = issue
        self._signal = signal
        self._clock = clock
        self._in_stream = in_stream
        self._in_progress: deque[tuple[Round, RoundOutput | BaseException]] = deque()
        self._num_taken = 0
        self._last_end_s = 0.0
        self._interrupted = threading.Event()

    def submit(self, batch: Round) -> None:
        """Issue ``batch``; what that raises becomes its output, in its turn."""
        with self._in_stream():
            output: RoundOutput | BaseException
            try:
                output = self._issue(batch)
            except Exception as error:  # noqa: BLE001 - a request boundary: the scheduler is told
                output = error
            self._in_progress.append((batch, output))
            self._signal.record()

    def wait(self, timeout_s: float | None) -> tuple[Round, RoundOutput | BaseException] | None:
        """The oldest round once it is done; None at the timeout or when interrupted."""
        until_s = None if timeout_s is None else self._clock.now() + timeout_s
        while True:
            if self._in_progress and self._signal.num_done() > self._num_taken:
                self._num_taken += 1
                batch, output = self._in_progress.popleft()
                if isinstance(output, RoundOutput):  # it began when it was issued, or when the one before ended
                    ended_s = self._clock.now()
                    output = replace(output, started_s=max(output.started_s, self._last_end_s), ended_s=ended_s)
                    self._last_end_s = ended_s
                return batch, output
            if self._interrupted.is_set():
                self._interrupted.clear()
                return None
            if until_s is not None and self._clock.now() >= until_s:
                return None
            if self._in_progress:
                time.sleep(_POLL_S)
            else:
                self._interrupted.wait(None if until_s is None else max(0.0, until_s - self._clock.now()))

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        self._interrupted.set()

    def close(self) -> None:
        """Forget what is in progress."""
        self._in_progress.clear()


def to_pinned(values: Tensor) -> Tensor:
    """A copy on the host that is valid when the stream gets there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def cuda_graph(module: nn.Module, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A compiler: one batch size of a module as a CUDA graph over inputs of its own.

    Raises:
        DeviceError: the inputs are not on a CUDA device.
    """
    if not example_inputs or example_inputs[0].device.type != "cuda":
        raise DeviceError("a CUDA graph needs its inputs on a CUDA device")
    inputs = [value.clone() for value in example_inputs]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):  # libraries choose their kernels and take their memory before the capture
            module(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        outputs = module(*inputs)

    def replay(*values: Tensor) -> Any:
        for own, value in zip(inputs, values, strict=True):
            own.copy_(value, non_blocking=True)
        graph.replay()
        return outputs

    return replay
