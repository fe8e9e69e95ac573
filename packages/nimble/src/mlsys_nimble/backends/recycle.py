"""Memory for values that outlive a replay: results, gradients, and what a forward pass saves for the backward pass.

A replay must not write to memory that is still in use: a result belongs to the caller, and a second forward pass may
precede the first one's backward pass. So each such value has several buffers, and a replay takes one that only this
pool holds, by the reference count of the storage. Callers may accumulate gradients, keep graphs alive and store
results without telling Nimble; dropped buffers are reused, without the page faults of fresh memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Recycled:
    """Pool of tensors of one shape, dtype and layout, whose memory is reused once nothing else holds it.

    Example:
        >>> pool = Recycled((2,), (1,), torch.float32)
        >>> first = pool.take().data_ptr()  # dropped at once
        >>> kept = pool.take()
        >>> kept.data_ptr() == first, pool.take().data_ptr() == first, pool.nbytes
        (True, False, 16)
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
        self._kept: list[tuple[Tensor, int, int]] = []  # a tensor, its storage's handle, its count when free

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(tensor.untyped_storage().nbytes() for tensor, _, _ in self._kept)

    def take(self) -> Tensor:
        """Return a tensor that shares memory with no other live one; its elements are undefined."""
        for tensor, handle, free in self._kept:
            if not is_held(handle, free):
                return torch.empty(0, dtype=self.dtype).set_(tensor)  # type: ignore[call-overload,no-any-return]
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        handle = tensor.untyped_storage()._cdata
        self._kept.append((tensor, handle, count_of(handle)))
        return torch.empty(0, dtype=self.dtype).set_(tensor)  # type: ignore[call-overload,no-any-return]


def count_of(handle: int) -> int:
    """Return the reference count of a storage (``storage._cdata``): tensors, and Python's object for it."""
    count: int = torch._C._storage_Use_Count(handle)
    return count


def is_held(handle: int, free: int) -> bool:
    """Return whether a storage has more references than ``free``, its count when it was not in use."""
    return count_of(handle) > free
