"""Tensors in memory that processes share: one side puts them, the other reads them in place.

The memory is anonymous and made before the fork; a part of it has one owner, who hands out its pages. What is small,
or finds no room, is handed over as bytes, to be sent in a frame.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import ServingError
from mlsys_core.memory.run_pool import RunPool

from mlsys_serving.processes.channel import MAX_FRAME_NBYTES

Array = npt.NDArray[Any]
PAGE_NBYTES = 4096
INLINE_NBYTES = 16 << 10  # up to so many are sent in the frame: cheaper than pages and a message that frees them
MAX_INLINE_NBYTES = MAX_FRAME_NBYTES // 2
_ALIGNMENT = 64
_TEXT = "bytes"  # the dtype of an array of objects that are bytes: their lengths, then all of them


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensors that were put somewhere."""

    layout: list[list[Any]]  # of each: name, dtype, shape, offset from the start
    inline: bytes  # in which they are, if they lie in no pages
    page: int | None  # the first
    num_pages: int = 0


class SharedPart:
    """A part of shared memory, from the side of the one who hands it out. It has no lock.

    Args:
        memory: Anonymous and shared.
        first: Its first page.
        num_pages: Its size.

    Example:
        >>> memory = mmap.mmap(-1, 1 << 16)
        >>> placed = SharedPart(memory, 0, 16).put({"x": np.arange(8000)})
        >>> placed.inline, read(memory, placed.layout, placed.inline, placed.page)["x"][-1].item()
        (b'', 7999)
    """

    def __init__(self, memory: mmap.mmap, first: int, num_pages: int) -> None:
        self._memory = memory
        self._pages = RunPool(first, first + num_pages)

    @property
    def num_used(self) -> int:
        """Pages handed out."""
        return self._pages.num_used

    def put(self, arrays: Mapping[str, Array]) -> Placed:
        """Copy arrays into pages, or into bytes where they are small or there is no room now.

        Raises:
            ServingError: There is no room, and they are too large for a frame.
        """
        layout, parts, nbytes = _layout(arrays)
        num_pages = math.ceil(nbytes / PAGE_NBYTES)
        page = self._pages.take(num_pages) if nbytes > INLINE_NBYTES else None
        if page is None and nbytes > MAX_INLINE_NBYTES:
            raise ServingError(f"there is no room for tensors of {nbytes} bytes: send fewer at a time")
        target: Any = bytearray(nbytes) if page is None else self._memory
        start = 0 if page is None else page * PAGE_NBYTES
        for (_, dtype, _, offset), part in zip(layout, parts, strict=True):
            if isinstance(part, bytes):
                target[start + offset : start + offset + len(part)] = part
            elif part.size:
                into = np.frombuffer(target, dtype, part.size, start + offset).reshape(part.shape)
                into[...] = part
        return Placed(layout, bytes(target) if page is None else b"", page, 0 if page is None else num_pages)

    def free(self, page: int, num_pages: int) -> None:
        """Take pages back that :meth:`put` gave."""
        self._pages.give_back(page, num_pages)


def read(memory: mmap.mmap, layout: Sequence[Sequence[Any]], inline: bytes, page: int | None) -> dict[str, Array]:
    """Return arrays that were put, as they lie there: read-only views, good until their pages are freed."""
    source: Any = inline if page is None else memory
    start = 0 if page is None else page * PAGE_NBYTES
    arrays: dict[str, Array] = {}
    for name, dtype, shape, offset in layout:
        if dtype == _TEXT:
            found = _texts(source, start + offset, tuple(shape))
        elif math.prod(shape):
            found = np.frombuffer(source, dtype, math.prod(shape), start + offset).reshape(shape)
        else:
            found = np.zeros(shape, dtype)
        found.flags.writeable = False
        arrays[name] = found
    return arrays


def _layout(arrays: Mapping[str, Array]) -> tuple[list[list[Any]], list[Array | bytes], int]:
    layout: list[list[Any]] = []
    parts: list[Array | bytes] = []
    offset = 0
    for name, array in arrays.items():
        part: Array | bytes = array
        dtype, nbytes = array.dtype.str, array.nbytes
        if array.dtype == np.object_:
            texts = array.ravel().tolist()
            part = np.array([len(text) for text in texts], "<i8").tobytes() + b"".join(texts)
            dtype, nbytes = _TEXT, len(part)
        layout.append([name, dtype, list(array.shape), offset])
        parts.append(part)
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, parts, offset


def _texts(source: Any, start: int, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    found = np.empty(count, np.object_)
    at = start + 8 * count
    for index, length in enumerate(np.frombuffer(source, "<i8", count, start).tolist() if count else []):
        found[index] = bytes(source[at : at + length])
        at += length
    return found.reshape(shape)
