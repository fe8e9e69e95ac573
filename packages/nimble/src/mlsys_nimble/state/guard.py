"""The system's guard of pages, and the process's one book of what it guards: the bindings of ``pages.h``."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any

from mlsys_nimble.state.digest import load_digest
from mlsys_nimble.state.forks import renew_in_forks
from mlsys_nimble.state.pages import PageBook, Range, State


class SystemGuard:
    """Guard of this process's pages by the kernel; see :class:`~mlsys_nimble.state.pages.Guard`.

    Raises:
        OSError: the kernel lacks what this needs, or forbids it.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        native.nimble_pages_open.restype = native.nimble_pages_own.restype = c_void_p
        native.nimble_pages_scan.restype = c_int64
        error = c_int32(0)
        opened = native.nimble_pages_open(byref(error))
        if not opened:
            raise OSError(error.value, os.strerror(error.value))
        self._handle = c_void_p(opened)
        weakref.finalize(self, native.nimble_pages_close, self._handle).atexit = False
        self._is_own = c_int32.from_address(native.nimble_pages_own(self._handle))

    def is_own(self) -> bool:
        """See :class:`~mlsys_nimble.state.pages.Guard`."""
        return self._is_own.value == 1

    def target(self, ranges: Sequence[Range]) -> Any:
        """See :class:`~mlsys_nimble.state.pages.Guard`."""
        addresses = [address for each in ranges for address in each]
        return (c_uint64 * len(addresses))(*addresses), c_int64(len(ranges)), c_uint8 * len(ranges)

    def scan(self, target: Any) -> Sequence[int] | None:
        """See :class:`~mlsys_nimble.state.pages.Guard`."""
        addresses, count, array = target
        states = array()  # of this call: others may scan the same ranges meanwhile
        return states if self._native.nimble_pages_scan(self._handle, addresses, count, states) else None

    def arm(self, begin: int, end: int) -> bool:
        """See :class:`~mlsys_nimble.state.pages.Guard`."""
        return not self._native.nimble_pages_arm(self._handle, c_uint64(begin), c_uint64(end))

    def disarm(self, begin: int, end: int) -> None:
        """See :class:`~mlsys_nimble.state.pages.Guard`."""
        self._native.nimble_pages_disarm(self._handle, c_uint64(begin), c_uint64(end))


class ProcessPages:
    """Book of this process's guarded pages, made when it is first asked for; a forked process makes its own."""

    def __init__(self) -> None:
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Forget the parent's."""
        self._lock = threading.Lock()
        self._found: tuple[PageBook | None, str] | None = None

    def find(self) -> tuple[PageBook | None, str]:
        """Return the book, or None and the reason why the system guards no pages."""
        with self._lock:
            if self._found is None or (self._found[0] and not self._found[0].guard.is_own()):
                self._found = _make_book()
            return self._found


@cache
def _process() -> ProcessPages:
    return ProcessPages()


def page_book() -> PageBook | None:
    """Return the book of this process; None where the system guards no pages."""
    return _process().find()[0]


def refusal() -> str:
    """Return why this system guards no pages; empty if it does."""
    return _process().find()[1]


def _make_book() -> tuple[PageBook | None, str]:
    native = load_digest()
    if native is None:
        return None, "there is no C++ compiler"
    try:
        guard = SystemGuard(native)
    except OSError as error:
        return None, f"the kernel does not report written pages: {error.strerror}"
    if not _works(guard):
        return None, "the kernel reports written pages wrongly"
    return PageBook(guard, time.monotonic), ""


def _works(guard: SystemGuard) -> bool:
    """Return whether the guard tells of writes, of their absence, of pages thrown away and of those not guarded."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes([1]) * len(memory)
    first = c_char.from_buffer(memory)
    begin, end = addressof(first), addressof(first) + len(memory)
    target = guard.target([(begin, end)])

    def state() -> int:
        return (guard.scan(target) or [State.UNWRITTEN])[0]

    is_armed = guard.arm(begin, end)
    states = [state()]
    memory[page] = 2
    states.append(state())
    guard.arm(begin, end)
    states.append(state())
    memory.madvise(mmap.MADV_DONTNEED, page, page)
    states.append(state())
    guard.disarm(begin, end)
    states.append(state())
    del first
    return is_armed and states == [State.UNWRITTEN, State.WRITTEN, State.UNWRITTEN, State.WRITTEN, State.LOST]
