"""Load of the machine while something is measured: the share that other processes took."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from mlsys_core.posix.machine import num_cores

LOADED_SHARE = 0.1  # more than this and the times, unlike the ratios, mean little


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the machine during a run."""

    load_average: tuple[float, float]  # of one minute, before and after
    share_of_others: float  # of all processors' time, 0 to 1; what a hypervisor took counts as others'

    def __str__(self) -> str:
        before, after = self.load_average
        text = (
            f"Load average {before:.1f} before and {after:.1f} after on {num_cores()} cores; other processes used "
            f"{self.share_of_others:.0%} of the machine."
        )
        if self.share_of_others <= LOADED_SHARE:
            return text
        return f"{text} It had other work: compare the ratios, not the times."


class LoadMeter:
    """Measures the machine's load within the context; :attr:`load` has it afterwards.

    Ours are this process and all below it.
    """

    load = Load((0.0, 0.0), 0.0)

    def __enter__(self) -> LoadMeter:
        self._load_average, self._before = _load_average(), _times()
        return self

    def __exit__(self, *_: object) -> None:
        total, busy, own = (after - before for after, before in zip(_times(), self._before, strict=True))
        share = min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0
        self.load = Load((self._load_average, _load_average()), share)


def _load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none


def _times() -> tuple[float, float, float]:
    """Return seconds since boot over all processors: all, those not idle, and those of this process tree."""
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)  # user contains these
    this = psutil.Process()
    ended = this.cpu_times()  # of children that have ended, these two alone know
    own = getattr(ended, "children_user", 0.0) + getattr(ended, "children_system", 0.0)
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system
    return total, total - idle, own
