"""Load that is added on purpose, beside the meter of the load that is there (core's)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlsys_core.posix.machine import num_cores
from mlsys_core.profiling.machine_load import LOADED_SHARE, Load, LoadMeter

__all__ = ["LOADED_SHARE", "Load", "LoadMeter", "busy_processes", "num_cores"]


@contextmanager
def busy_processes(per_core: int) -> Iterator[None]:
    """Run so many processes on each core that compute all the time, at equal priority."""
    cores = sorted(os.sched_getaffinity(0)) * per_core
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    try:
        for spinner, core in zip(spinners, cores, strict=True):
            os.sched_setaffinity(spinner.pid, {core})
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
