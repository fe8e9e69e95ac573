"""Digests of tensors' memory, which detect writes that torch does not record."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from ctypes import c_char, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel
from torch import Tensor

DIGEST = Kernel(Path(__file__).with_name("digest.cpp"))


@cache
def _load() -> Any:
    """Load the compiled digest; None where there is neither the wheel's nor a compiler."""
    try:
        native = DIGEST.load()
    except KernelUnavailableError:
        return None
    native.nimble_digest.restype = c_uint64
    return native.nimble_digest


class Digest:
    """Digest of the bytes of some tensors.

    Args:
        tensors: Tensors on the CPU. The bytes from a tensor's first to its last element are read. The caller keeps the
            memory alive.

    Example:
        >>> import torch
        >>> weight = torch.ones(4)
        >>> digest = Digest([weight])
        >>> before = digest.read()
        >>> weight.numpy()[2] = 5
        >>> before == digest.read()
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pieces = {(tensor.data_ptr(), _nbytes(tensor)) for tensor in tensors if tensor.numel()}
        self._pieces = sorted(pieces)
        self._pointers = (c_void_p * max(len(pieces), 1))(*(pointer for pointer, _ in self._pieces))
        self._nbytes = (c_int64 * max(len(pieces), 1))(*(nbytes for _, nbytes in self._pieces))
        self._native = _load()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that a digest reads."""
        return sum(nbytes for _, nbytes in self._pieces)

    def read(self) -> int:
        """Return a number that changes with any byte, except with a chance of one in billions."""
        if not self._pieces:
            return 0
        if self._native is not None:
            return int(self._native(self._pointers, self._nbytes, c_int64(len(self._pieces))))
        state = 0
        for pointer, nbytes in self._pieces:
            state = zlib.crc32((c_char * nbytes).from_address(pointer), state)
        return state


def _nbytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
