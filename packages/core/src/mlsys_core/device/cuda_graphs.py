"""Features of CUDA devices alone: torch's current stream, graphs, and the allocator's reserve.

Beside :mod:`mlsys_core.device.cuda`, whose streams and events these deal in. All of ``torch.cuda`` that the subsystems
need is in these two modules. torch is imported when something is called.
"""

from __future__ import annotations

import warnings
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


class GraphPool:
    """Memory of graphs of one device that never run at the same time.

    An empty graph keeps it: torch refuses a pool whose graphs are all gone while a tensor still lies in it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._index = device.index
        self.renew()

    def renew(self) -> None:
        """Make a new pool for later captures: torch cannot capture again into the pool of a failed one."""
        import torch

        self.id = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        _capture_nothing(self._keeper, self.id, self._index)


@contextmanager
def capturing(
    *, stream: CudaStream | None = None, pool: GraphPool | None = None, error_mode: str = "global"
) -> Iterator[Any]:
    """Capture work put on ``stream``, and on streams forked from it, as a graph with a ``replay()``.

    After a failed capture, the current stream, the pool and the random generator can be used as before.

    Args:
        stream: where the capture begins; None: one of torch's own.
        pool: memory that other graphs use too; None: memory of the graph's own.
        error_mode: which other threads' calls end the capture; a mode of ``torch.cuda.graph``.

    Raises:
        Exception: the first error of the work, or that of the capture.
    """
    import torch

    graph, first = torch.cuda.CUDAGraph(), None
    torch_stream = None if stream is None else stream.torch_stream
    pool_id = torch.cuda.graph_pool_handle() if pool is None else pool.id
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool_id, stream=torch_stream, capture_error_mode=error_mode):
            try:
                yield graph
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(before)  # torch leaves its own where the capture's end fails
        if _end_failed(pool_id):
            _FAILED.append(graph)
            # The random generator thinks that the capture goes on until another one ends.
            (pool or GraphPool(CudaDevice(before.device_index))).renew()
        if first is not None and error is not first:
            raise first from None  # the end fails because the work did
        raise


_FAILED: list[Any] = []  # torch's allocator of host memory goes on to ask a graph whose capture did not end


def _end_failed(pool_id: Any) -> bool:
    """Return whether the end of a capture failed, and if so give its memory back, which torch leaves out."""
    import torch

    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool_id)
    except RuntimeError:
        return False
    torch._C._cuda_releasePool(device, pool_id)
    return True


def _capture_nothing(graph: Any, pool_id: Any, index: int) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, pool=pool_id, stream=stream, capture_error_mode="thread_local"):
            pass


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
