"""Collecting facts on this very machine, and judging made-up ones."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mlsys_core.device.capabilities import (
    BUILT_IN,
    CapabilityReport,
    CpuFacts,
    DistributionFacts,
    MemoryFacts,
    PlatformFacts,
    RequirementFacts,
    ToolFacts,
    probe,
    requirements_of,
)
from mlsys_core.device.checks import Check, is_broken, run_checks
from mlsys_core.device.protocols import MemoryInfo
from mlsys_core.device.torch_probe import CudaFacts, TorchFacts, torch_facts, torch_facts_of_child

GOOD = CapabilityReport(
    platform=PlatformFacts("Linux", "6.1", "x86_64", "3.12.1", "CPython"),
    cpu=CpuFacts("Some CPU", "x86_64", 4, 8, (0, 1, 2, 3), 2.5, 3, ("avx2",)),
    memory=MemoryFacts(MemoryInfo(total_nbytes=2**33, available_nbytes=2**32), 2**33),
    torch=TorchFacts("2.11.0", num_threads=4, num_interop_threads=4, cpu_capability="AVX2", has_mkldnn=True),
    triton="3.6.0",
    nvidia_driver=None,
    tools=(ToolFacts("g++", "12.2"), ToolFacts("clang++"), ToolFacts("nvcc"), ToolFacts("npm", "10.2")),
    package_manager="apt-get",
    distributions=tuple(DistributionFacts(name, "0.1.0") for name in BUILT_IN),
    requirements=(RequirementFacts("mlsys-core", "torch>=2.11", "2.11.0", True),),
)
GPU = CudaFacts(0, "H200", 141 * 2**30, "9.0")


def row(report: CapabilityReport, name: str) -> Check:
    (found,) = [check for check in run_checks(report) if check.name == name]
    return found


def test_probe_of_this_machine_is_true() -> None:
    import psutil
    import torch

    report = probe()
    assert report.platform.python == ".".join(map(str, sys.version_info[:3]))
    assert report.torch.version == torch.__version__
    assert report.torch.error is None
    assert report.cpu.num_logical_cores == os.cpu_count()
    assert report.cpu.num_effective_cores <= report.cpu.num_logical_cores
    assert report.memory is not None
    assert report.memory.now.total_nbytes <= psutil.virtual_memory().total
    assert {found.name: found.version for found in report.distributions}["mlsys-core"] == importlib.metadata.version(
        "mlsys-core"
    )
    assert not is_broken(run_checks(report))


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux's /proc")
def test_features_are_those_the_kernel_lists() -> None:
    report = probe()
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if report.cpu.family == "x86_64":
        for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"):
            assert (name in report.cpu.features) == (name in flags)
    else:
        assert set(report.cpu.features) <= flags


def test_a_child_finds_the_same_as_this_process() -> None:
    here, there = torch_facts(), torch_facts_of_child()
    assert replace(here, num_threads=0, num_interop_threads=0) == replace(there, num_threads=0, num_interop_threads=0)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise RuntimeError('no such driver')", "exit code 1: RuntimeError: no such driver"),
        ("print('hello')", "exit code 0: no message"),
        ("import signal; signal.pause()", "took more than"),
    ],
)
def test_a_torch_that_takes_its_process_along_is_a_finding(code: str, error: str) -> None:
    timeout_s = 0.2 if "pause" in code else 60
    facts = torch_facts_of_child(command=[sys.executable, "-c", code], timeout_s=timeout_s)
    assert facts.version is None
    assert error in (facts.error or "")
    assert is_broken(run_checks(replace(GOOD, torch=facts)))


def install(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
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
    facts = {fact.requirement: (fact.installed, fact.is_satisfied) for fact in requirements_of("asks-much")}
    assert facts == {
        "wanted-a<2,>=1.4": ("1.5", True),
        "wanted-a>=2": ("1.5", False),
        "wanted-b>=2.0rc1": ("2.0rc1", True),
        "not-there-at-all>=1": (None, False),
    }


def test_a_good_installation_has_nothing_broken_or_missing() -> None:
    statuses = {check.status for check in run_checks(GOOD)}
    assert statuses == {"ok", "info"}


def test_every_broken_or_missing_row_has_a_remedy_and_no_other_has() -> None:
    bad = replace(
        GOOD,
        torch=TorchFacts(None, "ModuleNotFoundError: No module named 'torch'"),
        triton=None,
        nvidia_driver="550.1",
        tools=(ToolFacts("g++"), ToolFacts("clang++"), ToolFacts("nvcc"), ToolFacts("npm", error="exit code 1")),
        distributions=(),
        requirements=(RequirementFacts("mlsys-core", "torch>=2.11", None, False),),
    )
    for report in (GOOD, bad, replace(bad, package_manager=None)):
        for check in run_checks(report):
            assert (check.fix is not None) == (check.status in {"missing", "broken"}), check


def test_sections_are_adjacent() -> None:
    sections = [check.section for check in run_checks(GOOD)]
    assert sum(a != b for a, b in itertools.pairwise(sections)) == len(set(sections)) - 1


@pytest.mark.parametrize(
    "error", ["ImportError: libtorch.so: cannot open", "cannot multiply a matrix: RuntimeError: x", "SIGILL"]
)
def test_a_torch_that_does_not_work_breaks_the_installation(error: str) -> None:
    report = replace(GOOD, torch=replace(GOOD.torch, error=error))
    check = row(report, "torch")
    assert (check.status, check.fix) == ("broken", "pip install --force-reinstall torch")
    assert error in check.value


def test_a_violated_requirement_of_core_is_broken_of_another_only_missing() -> None:
    def with_requirement(distribution: str) -> Check:
        fact = RequirementFacts(distribution, "rich>=13.7", "12.0", False)
        return row(replace(GOOD, requirements=(fact,)), "requirement")

    of_core = with_requirement("mlsys-core")
    assert (of_core.status, of_core.fix) == ("broken", "pip install 'rich>=13.7'")
    assert of_core.value == "mlsys-core needs rich>=13.7, 12.0 is installed"
    assert with_requirement("mlsys-orca").status == "missing"


@pytest.mark.parametrize(
    ("manager", "fix"),
    [
        ("apt-get", "apt-get install g++"),
        ("dnf", "dnf install gcc-c++"),
        ("apk", "apk add g++"),
        (None, "install g++ with"),
    ],
)
def test_a_missing_compiler_names_the_command_of_this_system(manager: str | None, fix: str) -> None:
    tools = (ToolFacts("g++"), ToolFacts("clang++"))
    report = replace(GOOD, tools=tools, package_manager=manager)
    assert row(report, "g++").status == "missing"
    assert (row(report, "g++").fix or "").startswith(fix)
    assert row(report, "clang++").status == "info"


def test_one_compiler_is_enough() -> None:
    report = replace(GOOD, tools=(ToolFacts("g++"), ToolFacts("clang++", "16.0")))
    assert row(report, "g++") == Check("Tools", "g++", "not found; clang++ serves", "info")


def test_nvcc_is_missed_only_where_there_is_a_gpu() -> None:
    assert row(GOOD, "nvcc").status == "info"
    with_gpu = replace(GOOD, torch=replace(GOOD.torch, cuda_version="12.8", cuda_devices=(GPU,)))
    assert row(with_gpu, "nvcc").fix == "apt-get install nvidia-cuda-toolkit"
    assert row(with_gpu, "cuda:0") == Check("GPU", "cuda:0", "H200, 141.0 GiB, capability 9.0", "ok")


def test_a_gpu_that_does_not_work_is_missing_but_the_cpu_still_serves() -> None:
    device = replace(GPU, error="cannot multiply a matrix: no kernel image")
    report = replace(GOOD, torch=replace(GOOD.torch, cuda_devices=(device,)))
    assert row(report, "cuda:0").status == "missing"
    assert "no kernel image" in row(report, "cuda:0").value
    assert not is_broken(run_checks(report))


def test_a_driver_without_cuda_in_torch_is_named() -> None:
    assert "built without CUDA" in row(replace(GOOD, nvidia_driver="550.1"), "CUDA").value
    hidden = replace(GOOD, nvidia_driver="550.1", torch=replace(GOOD.torch, cuda_version="12.8"))
    assert "finds no device" in row(hidden, "CUDA").value


def test_this_process_s_share_is_explained() -> None:
    assert row(GOOD, "usable by this process").value == "3; affinity allows 4; container quota 2.5"
