"""Pages of the system: huge ones under memory that is read from end to end, and freed ones given back.

Such memory has more 4 KiB pages than a TLB has entries for; and an allocator keeps what was freed, hundreds of
megabytes after a model is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

PAGE_NBYTES = 2 << 20  # on x86-64 and, mostly, on AArch64


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system for huge pages under the whole pages of a range; do nothing where it has none.

    Call it before the memory is first written to: pages that exist stay small.

    Args:
        address: First byte.
        nbytes: Length of the range in bytes.
    """
    begin = -(-address // PAGE_NBYTES) * PAGE_NBYTES
    end = (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
    if begin < end and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise()(begin, end - begin, mmap.MADV_HUGEPAGE)


@cache
def _malloc_trim() -> Any:
    """Return glibc's function; None where another allocator is at work."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def return_freed_memory() -> None:
    """Return whole pages of freed memory to the system; takes milliseconds, so not for hot loops.

    Example:
        >>> return_freed_memory()
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


class ReturnsMemory:
    """Owner's last attribute: when the owner is freed, its other attributes are freed first, and then their pages."""

    __slots__ = ()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may have been emptied
        if not is_ending():
            return_freed_memory()
