"""Cores and container limits, read from made-up file systems of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mlsys_core.device.limits import ContainerLimits, container_limits, effective_cores, memory_now
from mlsys_core.posix.machine import allowed_cores

GIB = 2**30


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert container_limits(tmp_path) == ContainerLimits(None, None, None)


def test_version_2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/service"
    files = {
        "proc/self/cgroup": "0::/service\n",
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 17\ninactive_file {GIB}\n",
    }
    assert container_limits(put(tmp_path, files)) == ContainerLimits(1.5, 4 * GIB, 2 * GIB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/outer/inner/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/outer/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }
    assert container_limits(put(tmp_path, files)) == ContainerLimits(0.5, 2 * GIB, GIB)


def test_max_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    assert container_limits(put(tmp_path, files)) == ContainerLimits(None, None, None)


def test_a_group_not_visible_from_inside_falls_back_to_the_mount_point(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/host/only/path\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert container_limits(put(tmp_path, files)).cpu_quota_cores == 2.0


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpuset:/\n2:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert container_limits(put(tmp_path, files)) == ContainerLimits(2.5, GIB, GIB // 4)


def test_memory_is_the_lesser_of_machine_and_container(tmp_path: Path) -> None:
    machine = memory_now(tmp_path / "nothing")
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2**24}\n",
        "sys/fs/cgroup/memory.current": f"{2**23}\n",
    }
    contained = memory_now(put(tmp_path, files))
    assert (contained.total_nbytes, contained.available_nbytes) == (2**24, 2**23)
    assert machine.total_nbytes > contained.total_nbytes


def test_available_is_never_negative(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert memory_now(put(tmp_path, files)).available_nbytes == 0


@pytest.mark.parametrize(
    ("allowed", "quota", "effective"), [(4, None, 4), (4, 2.0, 2), (4, 2.1, 3), (4, 0.2, 1), (2, 8.0, 2)]
)
def test_effective_cores(allowed: int, quota: float | None, effective: int) -> None:
    assert effective_cores(allowed, quota) == effective


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no affinity")
def test_allowed_cores_follow_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    assert allowed_cores() == frozenset(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cores() == frozenset({min(before)})
    finally:
        os.sched_setaffinity(0, before)
