"""Limits that a container (control group) sets for this process.

Both versions of Linux control groups are read; elsewhere there are no limits. The file system's root is an argument, so
that tests bring their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mlsys_core.device.protocols import MemoryInfo

_UNLIMITED_NBYTES = 1 << 60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """The tightest limits over a process's control group and those around it."""

    cpu_quota_cores: float | None  # processor seconds per second; None: no limit
    memory_limit_nbytes: int | None  # bytes; None: no limit
    memory_used_nbytes: int | None  # bytes used in the group that sets the limit, less page cache it can drop at once


def container_limits(root: Path = Path("/")) -> ContainerLimits:
    """Return the limits that control groups set for this process.

    Args:
        root: the file system to read ``proc/self/cgroup`` and ``sys/fs/cgroup`` in.
    """
    groups = list(_groups(root))
    quotas = [quota for kind, folder in groups if (quota := _cpu_quota(kind, folder)) is not None]
    limits = [found for kind, folder in groups if (found := _memory_limit(kind, folder)) is not None]
    limit_nbytes, used_nbytes = min(limits) if limits else (None, None)
    return ContainerLimits(min(quotas, default=None), limit_nbytes, used_nbytes)


def memory_now(root: Path = Path("/")) -> MemoryInfo:
    """Return total and available bytes for this process: the machine's, or its container's where that is less."""
    import psutil

    machine = psutil.virtual_memory()
    limits = container_limits(root)
    total, available = machine.total, machine.available
    if limits.memory_limit_nbytes is not None:
        total = min(total, limits.memory_limit_nbytes)
        available = min(available, limits.memory_limit_nbytes - (limits.memory_used_nbytes or 0))
    return MemoryInfo(total_nbytes=total, available_nbytes=max(0, available))


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (controller, folder) of each group around this process; controller is ``"v2"``, ``"cpu"``, ``"memory"``.

    Limits nest, so every group up to the mount point counts. A folder named in ``/proc`` may not be visible from inside
    a container; the mount point itself, where the container sees its own group, always ends the walk.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = root / "sys/fs/cgroup"
        if not controllers:
            kinds = [("v2", mounts), ("v2", mounts / "unified")]
        else:
            kinds = [(name, mounts / controllers) for name in controllers.split(",") if name in {"cpu", "memory"}]
            kinds += [(name, mounts / name) for name, folder in kinds if folder.name != name]
        inside = PurePosixPath(path.lstrip("/"))
        for kind, mount in kinds:
            for relative in (inside, *inside.parents):
                yield kind, mount / relative


def _cpu_quota(kind: str, folder: Path) -> float | None:
    if kind == "v2":
        words = (_read(folder / "cpu.max") or "").split()
    elif kind == "cpu":
        words = [_read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""]
    else:
        return None
    quota, period = (_number(word) for word in words) if len(words) == 2 else (None, None)
    return quota / period if quota and period and quota > 0 else None  # "max" (version 2) and -1 (version 1): no limit


def _memory_limit(kind: str, folder: Path) -> tuple[int, int] | None:
    """Return (limit, used) in bytes, or None if this group sets no limit."""
    if kind == "v2":
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
    elif kind == "memory":
        limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    else:
        return None
    limit_nbytes = _number(_read(folder / limit))
    if limit_nbytes is None or limit_nbytes >= _UNLIMITED_NBYTES:
        return None
    statistics = dict(
        line.split() for line in (_read(folder / "memory.stat") or "").splitlines() if line.count(" ") == 1
    )
    return limit_nbytes, max(0, (_number(_read(folder / used)) or 0) - (_number(statistics.get(cache)) or 0))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def effective_cores(num_allowed: int, quota_cores: float | None) -> int:
    """Return the number of threads that can really run at once.

    These are the allowed cores, cut to the quota rounded up, at least 1.

    Example:
        >>> effective_cores(8, 2.5), effective_cores(8, None)
        (3, 8)
    """
    return max(1, min(num_allowed, math.ceil(quota_cores) if quota_cores else num_allowed))
