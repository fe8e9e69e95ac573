"""Digests of tensors' memory, which detect writes that torch does not record."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from ctypes import c_char, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel
from mlsys_nimble.state.pages import Piece
from torch import Tensor

_HERE = Path(__file__).parent
DIGEST = Kernel(_HERE / "digest.cpp", headers=(_HERE / "digest.h", _HERE / "pages.h"))


@cache
def load_digest() -> Any:
    """Load the compiled digests; None where there is neither the wheel's nor a compiler."""
    try:
        native = DIGEST.load()
    except KernelUnavailableError:
        return None
    native.nimble_digest.restype = c_uint64
    return native


class Unchanged(Protocol):
    """Record of tensors' bytes, to compare with what they are."""

    @property
    def nbytes(self) -> int:
        """Return how many a look reads."""
        ...

    def is_same(self, *, has_team: bool) -> bool:
        """Return whether they are it still; ``has_team``: while no call of the executor runs."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """An executor whose workers compare bytes together."""

    def compare(self, pieces: Sequence[Piece]) -> Unchanged:
        """Return what the bytes of some memory are now; the caller keeps it alive."""
        ...


class Digest:
    """Digest of the bytes of some tensors.

    Args:
        tensors: Tensors on the CPU. The bytes from a tensor's first to its last element are read. The caller keeps the
            memory alive.
        pieces: Addresses and bytes of further memory, as :func:`pieces_of` returns them.

    Example:
        >>> import torch
        >>> weight = torch.ones(4)
        >>> digest = Digest([weight])
        >>> before = digest.read()
        >>> weight.numpy()[2] = 5
        >>> before == digest.read()
        False
    """

    def __init__(self, tensors: Sequence[Tensor] = (), *, pieces: Sequence[Piece] = ()) -> None:
        self._pieces = [*pieces_of(tensors), *pieces]
        self._pointers, self._nbytes = address_arrays(self._pieces)
        self._native = load_digest()
        self._found = self.read()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that a digest reads."""
        return sum(nbytes for _, nbytes in self._pieces)

    def is_same(self, *, has_team: bool = False) -> bool:
        """Return whether all bytes are what they were when this was made; there is no team to help."""
        del has_team
        return self.read() == self._found

    def read(self) -> int:
        """Return a number that changes with any byte, except with a chance of one in billions."""
        if not self._pieces:
            return 0
        if self._native is not None:
            return int(self._native.nimble_digest(self._pointers, self._nbytes, c_int64(len(self._pieces))))
        return _crc32(self._pieces)


def _crc32(pieces: Iterable[Piece]) -> int:
    state = 0
    for pointer, nbytes in pieces:
        state = zlib.crc32((c_char * nbytes).from_address(pointer), state)
    return state


def pieces_of(tensors: Iterable[Tensor]) -> list[Piece]:
    """Return the address and bytes of each tensor's memory, each once."""
    return sorted({(tensor.data_ptr(), _nbytes(tensor)) for tensor in tensors if tensor.numel()})


def address_arrays(pieces: Sequence[Piece]) -> tuple[Any, Any]:
    """Return C arrays of the pieces' addresses and bytes."""
    size = max(len(pieces), 1)
    pointers = (c_void_p * size)(*(pointer for pointer, _ in pieces))
    return pointers, (c_int64 * size)(*(nbytes for _, nbytes in pieces))


def _nbytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
