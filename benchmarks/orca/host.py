"""Load of the machine during a run: the share of other processes, and the load that ``--loaded`` adds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_SPIN = "while True: pass"


class Shares:
    """Measures the processors' time within the context. Read ``foreign``, the share of others, after it.

    Ours are this process and all below it: load generator, contestant, and the processes of ``--loaded``. Time that a
    hypervisor took for other machines counts as foreign.
    """

    foreign: float = 0.0  # of all processors' time, 0 to 1

    def __enter__(self) -> Shares:
        self._before = _times()
        return self

    def __exit__(self, *_: object) -> None:
        total, busy, own = (after - before for after, before in zip(_times(), self._before, strict=True))
        self.foreign = min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0


def _times() -> tuple[float, float, float]:
    """Return seconds since boot over all processors: all, those not idle, and those of this process tree."""
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)  # user contains these
    own = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system
    return total, total - idle, own


@contextmanager
def busy_processes(is_loaded: bool) -> Iterator[None]:
    """Run one process on each core that computes all the time, at equal priority, if ``is_loaded``."""
    cores = sorted(os.sched_getaffinity(0)) if is_loaded else []
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in cores]
    try:
        for spinner, core in zip(spinners, cores, strict=True):
            os.sched_setaffinity(spinner.pid, {core})
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
