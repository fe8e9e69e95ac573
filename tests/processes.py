"""Waiting for processes that are not one's own children."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


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
