"""Facts that the system tells of this machine and process: cores, processor, memory. Empty where it does not say."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def allowed_cores() -> frozenset[int] | None:
    """Return the numbers of the cores this process may run on; None where the system cannot tell (macOS, Windows)."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(os.sched_getaffinity(os.getpid()))  # of the main thread: a pinned worker may be asking


def num_cores() -> int:
    """Return how many cores this process may run on, at least 1.

    Example:
        >>> num_cores() >= 1
        True
    """
    return len(allowed_cores() or ()) or os.cpu_count() or 1


def run_on_core(thread_id: int, core: int) -> None:
    """Keep a thread, by the system's number, on one core; where the system cannot, do nothing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread_id, {core})


def run_on_cores(cores: Collection[int]) -> None:
    """Keep the calling thread, and those that it starts later, on these cores; where the system cannot, do nothing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def processor_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo; none where there is no such file."""
    return _lines("/proc/cpuinfo")


def is_loaded(library: str) -> bool:
    """Return whether a library whose path has ``library`` in it lies in this process; False if that is not known."""
    return any(library in line for line in _lines("/proc/self/maps"))


def private_memory() -> list[tuple[int, int]]:
    """Return the ranges of this process's addresses that are no file's and that it shares with no other, in order.

    Neighbours are joined; there are none where the system does not say. Stacks are left out.
    """
    found: list[tuple[int, int]] = []
    for line in _lines("/proc/self/maps"):
        addresses, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode[3] != "p" or inode != "0" or (name and name[0] != "[heap]" and not name[0].startswith("[anon:")):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def num_memory_kills() -> int:
    """Return how many processes of this control group the system has killed for their memory; 0 if it does not say."""
    lines = _lines("/sys/fs/cgroup/memory.events")
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
