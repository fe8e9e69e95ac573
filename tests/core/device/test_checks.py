"""The doctor's rows, by what they say: of this very machine, of made-up tools on the path, and of made-up torches."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlsys_core.cli.doctor import _machine_checks
from mlsys_core.device import checks, torch_probe
from mlsys_core.device.checks import BUILT_IN, Check


def by_name(found: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_rows_of_this_machine_are_true() -> None:
    found = list(_machine_checks())
    rows = by_name(found)
    assert rows["Python"].value == f"{platform.python_version()} (CPython)"
    assert rows["torch"] == Check("Torch", "torch", f"{torch.__version__}, multiplies", "ok")
    assert rows["cores"].value.endswith(f"{os.cpu_count()} logical")
    assert 1 <= int(rows["usable by this process"].value.partition(";")[0]) <= (os.cpu_count() or 1)
    assert rows["mlsys-core"].status == "ok"
    assert all((check.fix is not None) == (check.status in {"missing", "broken"}) for check in found)
    assert "broken" not in {check.status for check in found}
    sections = [check.section for check in found]
    assert sum(a != b for a, b in itertools.pairwise(sections)) == len(set(sections)) - 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the flags of an x86-64")
def test_features_are_those_the_kernel_lists() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    rows = by_name(checks.system_checks())
    for name, title in checks.CPU_FEATURES["x86_64"].items():
        assert rows[title].value == ("yes" if name in flags else "no")


def test_this_process_s_share_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "allowed_cores", lambda: frozenset({0, 1, 2, 3}))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    limits = SimpleNamespace(cpu_quota_cores=2.5, memory_limit_nbytes=2**33)
    monkeypatch.setattr(checks, "container_limits", lambda: limits)
    rows = by_name(checks.system_checks())
    assert rows["usable by this process"].value == "3; affinity allows 4; container quota 2.5"
    assert rows["memory"].value.endswith("(container limit 8.0 GiB)")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "ended the process with SIGABRT"),
        ("raise RuntimeError('no such driver')", "exit code 1: RuntimeError: no such driver"),
        ("print('hello')", "exit code 0: no message"),
        ("import signal; signal.pause()", "took more than"),
    ],
)
def test_a_torch_that_takes_its_process_along_is_a_finding(code: str, error: str) -> None:
    timeout_s = 0.2 if "pause" in code else 60
    (row,) = torch_probe.torch_checks(command=[sys.executable, "-c", code], timeout_s=timeout_s)
    assert (row.name, row.status, row.fix) == ("torch", "broken", "pip install --force-reinstall torch")
    assert error in row.value


def rows_of_torch(monkeypatch: pytest.MonkeyPatch, *, devices: int = 0, driver: str | None = None, **of: Any) -> Any:
    """Return the rows, by name, of a made-up torch; its devices are this processor."""
    properties = SimpleNamespace(name="H200", total_memory=141 * 2**30, major=9, minor=0)
    cuda = SimpleNamespace(device_count=lambda: devices, get_device_properties=lambda _: properties)
    made = SimpleNamespace(**{**vars(torch), "cuda": cuda, **of})
    if devices and "arange" not in of:
        made.arange = lambda n, device: torch.arange(n)
        made.full = lambda shape, value, device: torch.full(shape, value)
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(torch_probe, "nvidia_driver", lambda: driver)
    return by_name(torch_probe.try_torch())


def test_a_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (row,) = torch_probe.try_torch()
    assert row.status == "broken"
    assert row.value.startswith("not usable: ModuleNotFoundError")


def test_a_torch_that_multiplies_wrongly_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows_of_torch(monkeypatch, full=lambda shape, value, device: torch.zeros(shape))["torch"]
    assert row == Check(
        "Torch",
        "torch",
        f"{torch.__version__}: multiplied a matrix wrongly",
        "broken",
        "pip install --force-reinstall torch",
    )


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_torch(monkeypatch, devices=1)
    assert rows["cuda:0"] == Check("GPU", "cuda:0", "H200, 141.0 GiB, capability 9.0", "ok")
    assert "CUDA" not in rows


def test_a_gpu_that_does_not_work_is_missing_but_the_cpu_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def arange(n: float, device: str) -> torch.Tensor:
        if device != "cpu":
            raise RuntimeError("no kernel image")
        return torch.arange(n)

    rows = rows_of_torch(monkeypatch, devices=1, arange=arange)
    assert (rows["torch"].status, rows["cuda:0"].status) == ("ok", "missing")
    assert rows["cuda:0"].value.endswith("cannot multiply a matrix: RuntimeError: no kernel image")


@pytest.mark.parametrize(
    ("driver", "cuda", "says", "status"),
    [
        (None, None, "no NVIDIA driver found", "info"),
        ("550.1", None, "built without CUDA", "missing"),
        ("550.1", "12.8", "finds no device", "missing"),
    ],
)
def test_a_machine_without_a_usable_gpu_says_why(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, cuda: str | None, says: str, status: str
) -> None:
    row = rows_of_torch(monkeypatch, driver=driver, version=SimpleNamespace(cuda=cuda, hip=None))["CUDA"]
    assert says in row.value
    assert row.status == status


def tools(monkeypatch: pytest.MonkeyPatch, folder: Path, *, has_gpu: bool = False, **programs: str) -> Any:
    """Return the rows, by name, where the path has only these programs, by what their shell script does."""
    for name, script in programs.items():
        path = folder / name.replace("_", "-").replace("xx", "++")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return by_name(checks.tool_checks(has_gpu=has_gpu))


@pytest.mark.parametrize(
    ("manager", "fix"),
    [
        ("apt_get", "apt-get install g++"),
        ("dnf", "dnf install gcc-c++"),
        ("apk", "apk add g++"),
        ("none", "install g++ with"),
    ],
)
def test_a_missing_compiler_names_the_command_of_this_system(
    manager: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tools(monkeypatch, tmp_path, **{manager: "true"})
    assert rows["g++"].status == "missing"
    assert (rows["g++"].fix or "").startswith(fix)
    assert rows["clang++"].status == "info"


def test_one_compiler_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tools(monkeypatch, tmp_path, clangxx="echo clang version 16.0")
    assert rows["g++"] == Check("Tools", "g++", "not found; clang++ serves", "info")
    assert rows["clang++"] == Check("Tools", "clang++", "16.0", "ok")


def test_a_tool_that_does_not_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = tools(monkeypatch, tmp_path, npm="echo no node >&2; exit 3")["npm"]
    assert row.value == "found, but does not run: npm ended with exit code 3: no node"
    assert row.status == "missing"


def test_nvcc_is_missed_only_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools(monkeypatch, tmp_path, apt_get="true")["nvcc"].status == "info"
    assert tools(monkeypatch, tmp_path, has_gpu=True)["nvcc"].fix == "apt-get install nvidia-cuda-toolkit"


def install(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_requirements_are_checked_against_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "wanted-a", "1.5")
    install(tmp_path, "wanted-b", "2.0rc1")
    install(
        tmp_path,
        "asks-much",
        "1.0",
        "wanted-a>=1.4,<2",
        "wanted-a>=2",
        "wanted-b>=2.0rc1",
        "not-there-at-all>=1",
        "only-for-an-extra; extra == 'more'",
        "other-system; platform_system == 'Nonesuch'",
    )
    assert dict(checks.requirements_of("asks-much")) == {
        "wanted-a<2,>=1.4": None,
        "wanted-a>=2": "1.5",
        "wanted-b>=2.0rc1": None,
        "not-there-at-all>=1": "none",
    }


@pytest.mark.parametrize(("distribution", "status"), [("mlsys-core", "broken"), ("mlsys-orca", "missing")])
def test_a_violated_requirement_of_core_is_broken_of_another_only_missing(
    distribution: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = {distribution: [("rich>=13.7", "12.0")]}
    monkeypatch.setattr(checks, "requirements_of", lambda name: unmet.get(name, []))
    row = by_name(checks.package_checks())["requirement"]
    assert row.value == f"{distribution} needs rich>=13.7, 12.0 is installed"
    assert (row.status, row.fix) == (status, "pip install 'rich>=13.7'")


def test_a_built_in_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda _: None)
    rows = by_name(checks.package_checks())
    assert (rows["mlsys-core"].status, rows["mlsys-orca"].status) == ("broken", "missing")
    assert {rows[name].fix for name in BUILT_IN} == {f"pip install {name}" for name in BUILT_IN}
