"""Threads for the work of requests: reading bodies, rendering, tokenising, writing answers.

The event loop's thread serves every client, so work that grows with a request runs elsewhere. Large work has its own
thread, one piece at a time, so that memory is bounded and small work does not wait for megabytes.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 64 * 1024  # bytes, characters or values from which on work is large


class RequestThreads:
    """A thread for large work, and threads for small work if the front wants any.

    Args:
        name: the beginning of the threads' names.
        num_small: threads for small work; 0 does it in the event loop's thread, where it takes a fraction of a
            millisecond.
    """

    def __init__(self, name: str, *, num_small: int = 0) -> None:
        self._small = ThreadPoolExecutor(num_small, thread_name_prefix=name) if num_small else None
        self._large = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-large")

    def close(self) -> None:
        """End the threads when their work is done. Idempotent."""
        for pool in (self._small, self._large):
            if pool is not None:
                pool.shutdown(wait=False)

    async def run(self, call: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Return the result of ``call(*args)``, run in a thread that fits its size.

        Args:
            call: blocking work.
            args: its arguments.
            size: bytes, characters or values that it goes through; from :data:`LARGE` on it is large work.
        """
        pool = self._large if size >= LARGE else self._small
        if pool is None:
            return call(*args)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, partial(context.run, call, *args))

    def trim(self) -> None:
        """Return freed memory to the system, in the thread for large work."""
        try:
            self._large.submit(_trim)
        except RuntimeError:  # closed meanwhile
            return


def _trim() -> None:
    with_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give memory back by themselves
    if with_trim is not None:
        with_trim(0)
