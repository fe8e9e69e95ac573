"""Memory in large pages: a replay walks through all weights, more than there are entries for small pages in a TLB."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

REGION_NBYTES = 64 << 20  # asked for at once; what is not written to costs nothing
PAGE_NBYTES = 2 << 20  # on x86-64 and, mostly, on AArch64
ALIGNMENT = 64  # a cache line
LEAST_NBYTES = 64 << 10  # smaller tensors stay where they are


class LargePages:
    """Gives tensors places side by side in regions for which the system is asked for large pages.

    A region lives as long as one of its tensors. On systems that know no such request tensors stay where they are.
    """

    def __init__(self) -> None:
        self._rest: Tensor | None = None  # of the region, uint8

    def place(self, tensor: Tensor) -> Tensor:
        """A contiguous copy there; the tensor itself where it is small or there are no large pages."""
        if tensor.nbytes < LEAST_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._rest is None or self._rest.numel() < size:
            self._rest = _region(max(size, REGION_NBYTES))
        place, self._rest = self._rest[: tensor.nbytes], self._rest[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _region(size: int) -> Tensor:
    """At least ``size`` bytes from the beginning of a large page on."""
    memory = mmap.mmap(-1, size + PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: small pages do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    return region[-region.data_ptr() % PAGE_NBYTES :]
