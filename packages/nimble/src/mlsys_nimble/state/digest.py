"""Digests of tensors' memory, which detect writes that torch does not record."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from ctypes import c_char, c_int64, c_uint64, c_void_p
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel
from mlsys_nimble.state.ranges import Piece
from torch import Tensor

_HERE = Path(__file__).parent
DIGEST = Kernel(_HERE / "digest.cpp", headers=(_HERE / "digest.h", _HERE / "pages.h"))
PARTS = 64  # looks that read every byte once
STRETCHES = 8  # of a tensor, each read in PARTS slices
WHOLE_NBYTES = 4096  # tensors up to this size are read whole at every look
SLICE_NBYTES = 64  # at least; STRETCHES of them fit in WHOLE_NBYTES


@cache
def load_digest() -> Any:
    """Load the compiled digests; None where there is neither the wheel's nor a compiler."""
    try:
        native = DIGEST.load()
    except KernelUnavailableError:
        return None
    native.nimble_digest.restype = native.nimble_digest_part.restype = c_uint64
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


class Samples:
    """Digests of one part of some tensors' bytes after another: each of :data:`PARTS` looks reads other bytes.

    A tensor is cut into :data:`STRETCHES`, and a look reads one slice of each. So a write to all of a tensor, or to a
    quarter of it that lies together, is seen by the next look, and a write to any byte by one of the next
    :data:`PARTS`. Tensors up to :data:`WHOLE_NBYTES` are read whole by each look.

    Args:
        tensors: As for :class:`Digest`.

    Example:
        >>> import torch
        >>> weight = torch.ones(100, 100)
        >>> samples = Samples([weight])
        >>> weight.data.mul_(2).numel(), samples.look()
        (10000, False)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._small = Digest([tensor for tensor in tensors if _nbytes(tensor) <= WHOLE_NBYTES])
        self._pieces = pieces_of([tensor for tensor in tensors if _nbytes(tensor) > WHOLE_NBYTES])
        self._pointers, self._nbytes = address_arrays(self._pieces)
        self._native = load_digest()
        self._parts = [self._read(part) for part in range(PARTS)] if self._pieces else []
        self._next = count()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that a look reads, at most."""
        return self._small.nbytes + sum(STRETCHES * _slice(-(-nbytes // STRETCHES)) for _, nbytes in self._pieces)

    def look(self) -> bool:
        """Return whether the next part of the bytes, and every small tensor, are what they were."""
        if not self._small.is_same():
            return False
        part = next(self._next) % PARTS
        return not self._parts or self._read(part) == self._parts[part]

    def look_at_all(self) -> bool:
        """Return whether every byte is what it was."""
        parts = [self._read(part) for part in range(len(self._parts))]
        return self._small.is_same() and parts == self._parts

    def _read(self, part: int) -> int:
        if self._native is not None:
            sizes = map(c_int64, (len(self._pieces), STRETCHES, SLICE_NBYTES, PARTS, part))
            return int(self._native.nimble_digest_part(self._pointers, self._nbytes, *sizes))
        return _crc32(piece for pointer, nbytes in self._pieces for piece in _slices(pointer, nbytes, part))


def _slice(length: int) -> int:
    return max(-(-length // PARTS), SLICE_NBYTES)


def _slices(pointer: int, nbytes: int, part: int) -> Iterable[tuple[int, int]]:
    """Yield the address and bytes of a part's slices, as ``digest.cpp`` reads them."""
    for stretch in range(STRETCHES):
        begin = nbytes * stretch // STRETCHES
        length = nbytes * (stretch + 1) // STRETCHES - begin
        size = _slice(length)
        yield pointer + begin + min(part * size, length - size), size


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
