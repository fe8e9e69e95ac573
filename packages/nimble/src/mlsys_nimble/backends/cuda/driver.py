"""Calls to core's CUDA device that carry out a plan; tests replace the driver by one that records.

A driver makes no decisions. Its streams, events, graphs and pools are opaque handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from mlsys_core.device import CudaDevice
from mlsys_core.device.cuda_graphs import GraphPool, active, capturing, forget_workspaces, reserved_nbytes
from torch import Tensor

Handle = Any  # a stream, an event, a graph or a pool
WARM_UPS, TIMED = 3, 10  # calls of the measured work


class Driver(Protocol):
    """Device calls that the CUDA executor needs."""

    device: torch.device

    def current_stream(self) -> Handle:
        """Return the stream that the caller's work goes to."""
        ...

    def new_stream(self) -> Handle:
        """Return a stream beside the caller's."""
        ...

    def new_event(self) -> Handle:
        """Return an event that is not recorded yet."""
        ...

    def new_pool(self) -> Handle:
        """Return a pool of memory that graphs may share if they never run at once."""
        ...

    def record(self, event: Handle, stream: Handle) -> None:
        """Record the event after all work put on the stream so far."""
        ...

    def wait(self, event: Handle, stream: Handle) -> None:
        """Hold work put on the stream from now on until the event has passed."""
        ...

    def run(self, stream: Handle, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        """Call ``function(*arguments)`` with the stream as the current one."""
        ...

    def capturing(self, pool: Handle, stream: Handle) -> AbstractContextManager[Handle]:
        """Capture a graph of the work put, within the context, on the stream and on those forked from it."""
        ...

    def forget_workspaces(self) -> None:
        """Let libraries forget the memory that they keep for streams; the next call takes some anew."""
        ...

    def replay(self, graph: Handle) -> None:
        """Put a graph on the caller's stream."""
        ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy a tensor on the caller's stream."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...

    def random_kept(self) -> AbstractContextManager[None]:
        """Restore the device's random generator at the end of the context."""
        ...

    def tuned(self) -> AbstractContextManager[None]:
        """Let libraries try their algorithms on new problems and keep the fastest, within the context."""
        ...

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds of the work that ``work`` puts on the caller's stream; it is called several times."""
        ...

    def reserved_nbytes(self) -> int:
        """Return the bytes that the allocator holds on the device."""
        ...


class CoreDriver:
    """Driver over :mod:`mlsys_core.device`: its streams and events, and the graphs that only CUDA has.

    Args:
        cuda: CUDA device.
    """

    def __init__(self, cuda: CudaDevice) -> None:
        self.device = torch.device(cuda.torch_name)
        self._cuda = cuda

    def current_stream(self) -> Handle:
        """See :class:`Driver`."""
        return self._cuda.current_stream()

    def new_stream(self) -> Handle:
        """See :class:`Driver`."""
        return self._cuda.stream()

    def new_event(self) -> Handle:
        """See :class:`Driver`."""
        return self._cuda.event()

    def new_pool(self) -> Handle:
        """See :class:`Driver`."""
        return GraphPool(self._cuda)

    def record(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        stream.record(event)

    def wait(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        stream.wait(event)

    def run(self, stream: Handle, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        """See :class:`Driver`. Errors of the function are raised here, so it is not submitted as work."""
        with active(stream):
            return function(*arguments)

    def capturing(self, pool: Handle, stream: Handle) -> AbstractContextManager[Handle]:
        """See :class:`Driver`. The default generator registers itself: its offset advances with each replay."""
        return capturing(stream=stream, pool=pool, error_mode="thread_local")

    def forget_workspaces(self) -> None:
        """See :class:`Driver`."""
        forget_workspaces()

    def replay(self, graph: Handle) -> None:
        """See :class:`Driver`."""
        graph.replay()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See :class:`Driver`."""
        to.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """See :class:`Driver`."""
        self._cuda.synchronize()

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        """See :class:`Driver`."""
        with torch.random.fork_rng([self.device.index or 0]):
            yield

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """See :class:`Driver`."""
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, True
        try:
            yield
        finally:
            cudnn.benchmark = before

    def seconds(self, work: Callable[[], Any]) -> float:
        """See :class:`Driver`."""
        begin, end = (self._cuda.event(timing=True) for _ in range(2))
        for _ in range(WARM_UPS):
            work()
        stream = self._cuda.current_stream()
        stream.record(begin)
        for _ in range(TIMED):
            work()
        stream.record(end)
        end.synchronize()
        return begin.elapsed_ms(end) / TIMED * 1e-3

    def reserved_nbytes(self) -> int:
        """See :class:`Driver`."""
        return reserved_nbytes(self._cuda)
