"""The few calls to torch.cuda that carry out a plan, in one place; tests put a recorder in its place.

A driver owns no decisions. Streams, events, graphs and pools are whatever it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
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


class TorchDriver:
    """The driver over torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> Handle:
        """See :class:`Driver`."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Handle:
        """See :class:`Driver`."""
        return torch.cuda.Stream(device=self.device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Handle:
        """See :class:`Driver`."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def new_pool(self) -> Handle:
        """See :class:`Driver`."""
        return torch.cuda.graph_pool_handle()

    def record(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        event.record(stream)

    def wait(self, event: Handle, stream: Handle) -> None:
        """See :class:`Driver`."""
        stream.wait_event(event)

    def run(self, stream: Handle, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        """See :class:`Driver`."""
        with torch.cuda.stream(stream):
            return function(*arguments)

    @contextmanager
    def capturing(self, pool: Handle, stream: Handle) -> Iterator[Handle]:
        """See :class:`Driver`. The default generator registers itself: its offset advances with each replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph

    def replay(self, graph: Handle) -> None:
        """See :class:`Driver`."""
        graph.replay()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See :class:`Driver`."""
        to.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """See :class:`Driver`."""
        torch.cuda.synchronize(self.device)

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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(WARM_UPS):
            work()
        begin.record()
        for _ in range(TIMED):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / TIMED * 1e-3

    def reserved_nbytes(self) -> int:
        """See :class:`Driver`."""
        return torch.cuda.memory_reserved(self.device)
