"""Huge pages under memory that is read from end to end: more 4 KiB pages than a TLB has entries for."""

from __future__ import annotations

import ctypes
import mmap
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
