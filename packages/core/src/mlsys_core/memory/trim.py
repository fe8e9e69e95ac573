"""Give memory that was freed back to the system: an allocator keeps it, hundreds of megabytes after a model is gone."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


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
