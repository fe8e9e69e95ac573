"""Findings from facts: each row gives a fact, a status, and the command that repairs it.

Pure: a report in, rows out. ``broken`` means that this installation cannot work and makes ``mlsys doctor`` fail;
``missing`` is something optional that would help here; ``info`` is neither good nor bad.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mlsys_core.device.capabilities import BUILT_IN, CPU_FEATURES, CapabilityReport, ToolFacts

Status = Literal["ok", "info", "missing", "broken"]

INSTALL = {  # by package manager: its command, and its names of the tools
    "apt-get": (
        "apt-get install",
        {"g++": "g++", "clang++": "clang", "nvcc": "nvidia-cuda-toolkit", "npm": "npm"},
    ),
    "dnf": ("dnf install", {"g++": "gcc-c++", "clang++": "clang", "nvcc": "cuda-nvcc", "npm": "nodejs-npm"}),
    "apk": ("apk add", {"g++": "g++", "clang++": "clang", "npm": "npm"}),
    "brew": ("brew install", {"g++": "gcc", "clang++": "llvm", "npm": "node"}),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the doctor's report."""

    section: str
    name: str
    value: str
    status: Status
    fix: str | None = None  # the command that mends a missing or broken row


def run_checks(report: CapabilityReport) -> tuple[Check, ...]:
    """Judge ``report``; rows of one section are adjacent."""
    return (*_system(report), *_cpu(report), *_torch(report), *_gpu(report), *_tools(report), *_packages(report))


def is_broken(checks: Iterable[Check]) -> bool:
    """Return whether any row says that the installation cannot work."""
    return any(check.status == "broken" for check in checks)


def gib(nbytes: int) -> str:
    """Return bytes as readable GiB.

    Example:
        >>> gib(3 * 2**29)
        '1.5 GiB'
    """
    return f"{nbytes / 2**30:.1f} GiB"


def _system(report: CapabilityReport) -> Iterator[Check]:
    facts = report.platform
    yield Check("System", "platform", f"{facts.system} {facts.release} {facts.machine}", "info")
    yield Check("System", "Python", f"{facts.python} ({facts.implementation})", "ok")
    if report.memory is not None:
        now, limit = report.memory.now, report.memory.container_limit_nbytes
        value = f"{gib(now.available_nbytes)} available of {gib(now.total_nbytes)}"
        yield Check("System", "memory", value if limit is None else f"{value} (container limit {gib(limit)})", "ok")


def _cpu(report: CapabilityReport) -> Iterator[Check]:
    cpu = report.cpu
    yield Check("Processor", "model", cpu.model, "info")
    physical = "unknown" if cpu.num_physical_cores is None else str(cpu.num_physical_cores)
    yield Check("Processor", "cores", f"{physical} physical, {cpu.num_logical_cores} logical", "info")
    share = f"{cpu.num_effective_cores}"
    if cpu.allowed_cores is not None and len(cpu.allowed_cores) < cpu.num_logical_cores:
        share += f"; affinity allows {len(cpu.allowed_cores)}"
    if cpu.quota_cores is not None:
        share += f"; container quota {cpu.quota_cores:g}"
    yield Check("Processor", "usable by this process", share, "ok")
    for name, title in CPU_FEATURES.get(cpu.family, {}).items():
        has = name in cpu.features
        yield Check("Processor", title, "yes" if has else "no", "ok" if has else "info")


def _torch(report: CapabilityReport) -> Iterator[Check]:
    torch = report.torch
    if torch.error is not None:
        value = f"{torch.version or 'not usable'}: {torch.error}"
        yield Check("Torch", "torch", value, "broken", "pip install --force-reinstall torch")
    if torch.version is not None:
        if torch.error is None:
            yield Check("Torch", "torch", f"{torch.version}, multiplies", "ok")
        build = f"CUDA {torch.cuda_version}" if torch.cuda_version else None
        build = build or (f"ROCm {torch.hip_version}" if torch.hip_version else "CPU")
        yield Check("Torch", "build", build, "info")
        threads = f"{torch.num_threads} within operators, {torch.num_interop_threads} between"
        yield Check("Torch", "threads", threads, "info")
        yield Check("Torch", "kernels", torch.cpu_capability, "info")
        yield Check("Torch", "oneDNN", "yes" if torch.has_mkldnn else "no", "ok" if torch.has_mkldnn else "info")
    if report.triton is not None:
        yield Check("Torch", "triton", report.triton, "ok")
    elif report.platform.system == "Linux":
        yield Check("Torch", "triton", "not installed", "missing", "pip install triton")
    else:
        yield Check("Torch", "triton", f"not installed; not made for {report.platform.system}", "info")


def _gpu(report: CapabilityReport) -> Iterator[Check]:
    torch, driver = report.torch, report.nvidia_driver
    if driver is not None:
        yield Check("GPU", "NVIDIA driver", driver, "ok")
    for device in torch.cuda_devices:
        value = f"{device.name}, {gib(device.total_nbytes)}, capability {device.capability}"
        fix = None if device.error is None else "pip install --force-reinstall torch"
        value = value if device.error is None else f"{value}: {device.error}"
        yield Check("GPU", f"cuda:{device.index}", value, "ok" if device.error is None else "missing", fix)
    if torch.cuda_devices:
        return
    if driver is None:
        yield Check("GPU", "CUDA", "no NVIDIA driver found: everything runs on the CPU", "info")
    elif torch.version is not None and torch.cuda_version is None:
        fix = "pip install --force-reinstall torch"
        yield Check("GPU", "CUDA", "there is a GPU, but this torch is built without CUDA", "missing", fix)
    elif torch.version is not None:
        value = f"there is a driver, but torch (CUDA {torch.cuda_version}) finds no device: is it too old, or hidden?"
        yield Check("GPU", "CUDA", value, "missing", "unset CUDA_VISIBLE_DEVICES; nvidia-smi")


def _tools(report: CapabilityReport) -> Iterator[Check]:
    has_gpu = report.nvidia_driver is not None or bool(report.torch.cuda_devices)
    compilers = [tool.name for tool in report.tools if tool.name.endswith("++") and tool.version]
    for tool in report.tools:
        if tool.version is not None:
            yield Check("Tools", tool.name, tool.version, "ok")
        elif tool.error is not None:
            yield Check("Tools", tool.name, f"found, but does not run: {tool.error}", "missing", _install(report, tool))
        elif tool.name.endswith("++") and (compilers or tool.name == "clang++"):
            value = f"not found; {compilers[0]} serves" if compilers else "not found; either compiler will do"
            yield Check("Tools", tool.name, value, "info")
        elif tool.name == "nvcc" and not has_gpu:
            yield Check("Tools", tool.name, "not found; of use with an NVIDIA GPU only", "info")
        else:
            yield Check("Tools", tool.name, "not found", "missing", _install(report, tool))


def _install(report: CapabilityReport, tool: ToolFacts) -> str:
    command, packages = INSTALL.get(report.package_manager or "", ("", {}))
    if tool.name not in packages:
        return f"install {tool.name} with this system's package manager"
    return f"{command} {packages[tool.name]}"


def _packages(report: CapabilityReport) -> Iterator[Check]:
    installed = {found.name: found.version for found in report.distributions}
    for name, version in installed.items():
        yield Check("Packages", name, version, "ok")
    for name in BUILT_IN:
        if name == "mlsys-core" and name not in installed:
            yield Check("Packages", name, "imported, but not installed", "broken", f"pip install {name}")
        elif name not in installed:
            yield Check("Packages", name, "not installed", "missing", f"pip install {name}")
    for fact in report.requirements:
        if not fact.is_satisfied:
            value = f"{fact.distribution} needs {fact.requirement}, {fact.installed or 'none'} is installed"
            status: Status = "broken" if fact.distribution == "mlsys-core" else "missing"
            yield Check("Packages", "requirement", value, status, f"pip install {shlex.quote(fact.requirement)}")
    if report.requirements and all(fact.is_satisfied for fact in report.requirements):
        yield Check("Packages", "requirements", f"all {len(report.requirements)} satisfied", "ok")
