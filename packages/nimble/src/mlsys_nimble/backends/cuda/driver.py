"""The few calls to core's CUDA device that carry out a plan, in one place; tests put a recorder in its place.

A driver owns no decisions. Streams, events, graphs and pools are whatever it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from mlsys_core.device import CudaDevice
from mlsys_core.device.cuda_graphs import active, capturing, new_graph_pool, reserved_nbytes
from torch import Tensor

Handle = Any  # a stream, an event, a graph or a pool
WARM_UPS, TIMED = 3, 10  # calls of what is measured


class Driver(Protocol):
    """What the CUDA executor asks for."""

    device: torch.device

    def current_stream(self) -> Handle:
        """The stream that the caller's work goes to."""
        ...

    def new_stream(self) -> Handle:
        """A stream beside the caller's."""
        ...

    def new_event(self) -> Handle:
        """An event, not recorded."""
        ...

    def new_pool(self) -> Handle:
        """Memory that graphs may share which never run at once."""
        ...

    def record(self, event: Handle, stream: Handle) -> None:
        """Let the event stand for all that was put on the stream so far."""
        ...

    def wait(self, event: Handle, stream: Handle) -> None:
        """Hold what is put on the stream from now on until the event has passed."""
        ...

    def run(self, stream: Handle, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        """Call ``function(*arguments)`` with the stream as the current one."""
        ...

    def capturing(self, pool: Handle, stream: Handle) -> AbstractContextManager[Handle]:
        """A graph of what is put on the stream, and on those that are forked from it, within the context."""
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
        """The device's random generator is afterwards as it was before."""
        ...

    def tuned(self) -> AbstractContextManager[None]:
        """Libraries try their algorithms on what they have not met before, and keep the fastest."""
        ...

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of what ``work`` puts on the caller's stream; it is called several times."""
        ...

    def reserved_nbytes(self) -> int:
        """Bytes that the allocator holds on the device."""
        ...


class CoreDriver:
    """The driver over :mod:`mlsys_core.device`: its streams and events, and the graphs that CUDA alone has.

    Args:
        cuda: The device.
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
        return new_graph_pool()

    def record(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        stream.record(event)

    def wait(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        stream.wait(event)

    def run(self, stream: Handle, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        """See :class:`Driver`. What the function raises is raised here, so it is not submitted as work."""
        with active(stream):
            return function(*arguments)

    def capturing(self, pool: Handle, stream: Handle) -> AbstractContextManager[Handle]:
        """See :class:`Driver`. The default generator registers itself: its offset advances with each replay."""
        return capturing(stream=stream, pool=pool, error_mode="thread_local")

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
