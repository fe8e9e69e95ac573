"""Memory for what outlives a replay: results, gradients, and what the forward pass saves for the backward pass.

A replay may not write to memory that anybody still looks at: a result belongs to the caller, and a second forward pass
may come before the first one's backward pass. Every such value therefore has a few pieces of memory, and each replay
takes one that nobody but this pool holds, which the storage's own count of references tells. So gradients accumulate,
graphs are kept alive, and results are stored away without a word to Nimble; what is dropped is used again, without the
page faults of fresh memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Recycled:
    """Tensors of one shape, dtype and layout, made of memory that is used again once nobody else holds it.

    Example:
        >>> pool = Recycled((2,), (1,), torch.float32)
        >>> first = pool.take().data_ptr()  # dropped at once
        >>> kept = pool.take()
        >>> kept.data_ptr() == first, pool.take().data_ptr() == first, pool.nbytes
        (True, False, 16)
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
        self._kept: list[tuple[Tensor, int, int]] = []  # a tensor, its storage's handle, and its count when free

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(tensor.untyped_storage().nbytes() for tensor, _, _ in self._kept)

    def take(self) -> Tensor:
        """A tensor that shares memory with no other that is alive; its elements are whatever they were."""
        for tensor, handle, free in self._kept:
            if not is_held(handle, free):
                return torch.empty(0, dtype=self.dtype).set_(tensor)  # type: ignore[call-overload,no-any-return]
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        handle = tensor.untyped_storage()._cdata
        self._kept.append((tensor, handle, count_of(handle)))
        return torch.empty(0, dtype=self.dtype).set_(tensor)  # type: ignore[call-overload,no-any-return]


def count_of(handle: int) -> int:
    """Who holds a storage (``storage._cdata``): tensors, and Python's own object for it."""
    count: int = torch._C._storage_Use_Count(handle)
    return count


def is_held(handle: int, free: int) -> bool:
    """Whether more hold a storage than the ``free`` that did when nobody was given it."""
    return count_of(handle) > free
