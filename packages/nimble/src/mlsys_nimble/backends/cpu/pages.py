"""Weights side by side in huge pages: a replay walks through all of them."""

from __future__ import annotations

import torch
from mlsys_core.memory.pages import PAGE_NBYTES, advise_huge_pages
from torch import Tensor

REGION_NBYTES = 64 << 20  # asked for at once; pages that are not written to cost nothing
ALIGNMENT = 64  # a cache line
LEAST_NBYTES = 64 << 10  # smaller tensors stay where they are


class LargePages:
    """Regions of huge pages that tensors are copied into, side by side.

    A region lives as long as one of its tensors.
    """

    def __init__(self) -> None:
        self._rest: Tensor | None = None  # of the region, uint8

    def place(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in a region, or the tensor itself where it is small."""
        if tensor.nbytes < LEAST_NBYTES:
            return tensor
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._rest is None or self._rest.numel() < size:
            self._rest = _region(max(size, REGION_NBYTES))
        place, self._rest = self._rest[: tensor.nbytes], self._rest[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _region(size: int) -> Tensor:
    """Return at least ``size`` bytes that begin with a huge page."""
    region = torch.empty(size + PAGE_NBYTES, dtype=torch.uint8)
    region = region[-region.data_ptr() % PAGE_NBYTES :]
    advise_huge_pages(region.data_ptr(), region.nbytes)
    return region
