"""Features of CUDA devices alone: torch's current stream, graphs, and the allocator's reserve.

Beside :mod:`mlsys_core.device.cuda`, whose streams and events these deal in. All of ``torch.cuda`` that the subsystems
need is in these two modules. torch is imported when something is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mlsys_core.device.cuda import CudaDevice, CudaStream


def is_usable() -> bool:
    """Return whether torch can use some CUDA device."""
    import torch

    return torch.cuda.is_available()


def current_device() -> CudaDevice:
    """Return torch's current CUDA device.

    Raises:
        DeviceError: there is none.
    """
    import torch

    return CudaDevice(torch.cuda.current_device() if torch.cuda.is_available() else 0)


def active(stream: CudaStream) -> AbstractContextManager[None]:
    """Return a context in which ``stream`` is torch's current one."""
    import torch

    context: AbstractContextManager[None] = torch.cuda.stream(stream.torch_stream)
    return context


def new_graph_pool() -> Any:
    """Return a memory pool for graphs that never run at the same time."""
    import torch

    return torch.cuda.graph_pool_handle()


@contextmanager
def capturing(*, stream: CudaStream | None = None, pool: Any = None, error_mode: str = "global") -> Iterator[Any]:
    """Capture work put on ``stream``, and on streams forked from it, as a graph with a ``replay()``.

    Args:
        stream: where the capture begins; None: one of torch's own.
        pool: of :func:`new_graph_pool`; None: memory of the graph's own.
        error_mode: which other threads' calls end the capture; a mode of ``torch.cuda.graph``.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    torch_stream = None if stream is None else stream.torch_stream
    with torch.cuda.graph(graph, pool=pool, stream=torch_stream, capture_error_mode=error_mode):
        yield graph


def forget_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each stream; the next call on a stream takes some anew."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def reserved_nbytes(device: CudaDevice, *, gives_back: bool = False) -> int:
    """Return the bytes that torch's allocator holds on ``device``; ``gives_back``: after freeing unused ones."""
    import torch

    if gives_back:
        torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device.index)


def has_bf16(device: CudaDevice) -> bool:
    """Return whether ``device`` computes in bfloat16 natively."""
    import torch

    with torch.cuda.device(device.index):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def product_name(device: CudaDevice) -> str:
    """Return the product name of ``device``."""
    import torch

    return torch.cuda.get_device_name(device.index)
