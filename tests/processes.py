"""Waiting in tests: for a condition that another thread or process makes true, and for processes to end.

No test is decided by speed: see docs/testing.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
FAULT_S = 240.0  # only a fault takes so long, whatever else the machine does


def until(condition: Callable[[], T], *, timeout_s: float = FAULT_S, every_s: float = 0.01) -> T:
    """Ask ``condition`` again and again; return its first answer that is true.

    Args:
        condition: What another thread or process makes true.
        timeout_s: A deadline that only a fault reaches; then the last answer is told.
        every_s: Seconds between two looks.

    Raises:
        AssertionError: it did not become true.
    """
    late_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < late_s, f"not within {timeout_s:.0f} s: the last answer is {found!r}"
        time.sleep(every_s)
    return found


async def eventually(condition: Callable[[], T], *, timeout_s: float = FAULT_S, every_s: float = 0.01) -> T:
    """Do as :func:`until`, while the event loop goes on."""
    late_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < late_s, f"not within {timeout_s:.0f} s: the last answer is {found!r}"
        await asyncio.sleep(every_s)
    return found


@contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port of 127.0.0.1 for a server that is to bind it: the kernel gives it to nobody else meanwhile."""
    with socket.socket() as bound:  # and nobody listens
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def end(process: Any, timeout_s: float = 120.0) -> int:
    """Ask a process to end, one that a signal has stopped as well; return its exit code.

    Args:
        process: A :class:`subprocess.Popen`, or what a warm process has started.
        timeout_s: How long it may take; then it is killed.

    Raises:
        AssertionError: it had to be killed.
    """
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    try:
        return int(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"process {process.pid} had to be killed") from None


def await_ends(processes: Iterable[psutil.Process], timeout_s: float | None = None) -> list[psutil.Process]:
    """Wait until ``processes`` have ended; return those that have not after ``timeout_s``.

    ``psutil.wait_procs`` waits until somebody has fetched their status as well, which the init of a container
    may do but once a second.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    return [process for process in processes if not _ends(process, until)]


def abandoned(files: Iterable[Path]) -> set[Path]:
    """Return those of ``files`` that are there and mapped by no process: whoever made them has left them behind."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended
            mapped |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {file for file in files if file.exists() and str(file) not in mapped}


def _ends(process: psutil.Process, until: float | None) -> bool:
    if not process.is_running():  # its number may be another's by now
        return True
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1e3))
    finally:
        os.close(handle)


def by_age(process: psutil.Process) -> tuple[float, int]:
    """Return a key that sorts processes by age, one that is gone last: numbers alone begin anew after the largest."""
    try:
        return process.create_time(), process.pid
    except psutil.NoSuchProcess:
        return math.inf, process.pid
