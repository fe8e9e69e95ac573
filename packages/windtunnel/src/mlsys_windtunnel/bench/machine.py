"""Load of other processes on the machine during a race: the kernel's counters, less this process's own time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the start of each, over all cores."""

    busy_s: float  # of the machine, with what its host took
    total_s: float  # busy or idle
    own_s: float  # of this process and the children it has waited for


def cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """Read the counters now; None where the system does not tell (proc(5), ``/proc/stat``)."""
    try:
        first = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in first[1:9])
    busy = user + nice + system + irq + softirq + steal
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return CpuTimes(busy / ticks, (busy + idle + iowait) / ticks, sum(own[:4]))


def share_of_others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Return the part of the machine, 0 to 1, that others used between two readings; None if it cannot be told."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))
