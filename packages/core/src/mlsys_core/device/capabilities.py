"""Facts about this machine and installation, collected once; nothing here judges or renders them.

:mod:`mlsys_core.device.checks` turns a report into rows with a status and a remedy, ``mlsys doctor`` shows those, and
benchmarks write a report beside their numbers.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass

from mlsys_core.device.limits import container_limits, effective_cores, memory_now
from mlsys_core.device.protocols import MemoryInfo
from mlsys_core.device.torch_probe import TorchFacts, torch_facts, torch_facts_of_child
from mlsys_core.posix.machine import allowed_cores

BUILT_IN = (
    "mlsys-core",
    "mlsys-serving",
    "mlsys-nimble",
    "mlsys-orca",
    "mlsys-windtunnel",
    "mlsys-batchmaker",
    "mlsys-dvabatch",
)
TOOLS = ("g++", "clang++", "nvcc", "npm")
PACKAGE_MANAGERS = ("apt-get", "dnf", "apk", "brew")

CPU_FEATURES = {  # by processor family: archspec's names of the extensions that kernels have a use for, with titles
    "x86_64": {
        "avx2": "AVX2",
        "avx512f": "AVX-512F",
        "avx512_vnni": "AVX512-VNNI",
        "avx512_bf16": "AVX512-BF16",
        "amx_tile": "AMX-TILE",
        "amx_bf16": "AMX-BF16",
        "amx_int8": "AMX-INT8",
    },
    "aarch64": {"asimd": "NEON", "sve": "SVE", "bf16": "BF16", "i8mm": "I8MM"},
}


@dataclass(frozen=True, slots=True)
class PlatformFacts:
    """The operating system and the interpreter."""

    system: str  # "Linux"
    release: str  # of the kernel
    machine: str  # "x86_64"
    python: str  # "3.11.7"
    implementation: str  # "CPython"


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The processor and this process's share of it."""

    model: str
    family: str  # archspec's: "x86_64", "aarch64"
    num_physical_cores: int | None
    num_logical_cores: int
    allowed_cores: tuple[int, ...] | None  # numbers of the cores this process may run on; None: unknown
    quota_cores: float | None  # processor seconds per second its container allows; None: no limit
    num_effective_cores: int  # threads that can really run at once
    features: tuple[str, ...]  # archspec's names of the extensions in CPU_FEATURES that it has


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of the machine and of the container."""

    now: MemoryInfo
    container_limit_nbytes: int | None


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """A program on the search path."""

    name: str
    version: str | None = None  # None: not found, or it does not run
    error: str | None = None  # found, but it does not run


@dataclass(frozen=True, slots=True)
class DistributionFacts:
    """An installed distribution that is part of mlsys or plugs into it."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class RequirementFacts:
    """A required dependency of a built-in distribution, as its metadata states it."""

    distribution: str
    requirement: str  # "torch>=2.11"
    installed: str | None  # version; None: not installed
    is_satisfied: bool


@dataclass(frozen=True, slots=True)
class CapabilityReport:
    """All facts of one probe."""

    platform: PlatformFacts
    cpu: CpuFacts
    memory: MemoryFacts | None  # None: psutil is not installed
    torch: TorchFacts
    triton: str | None  # version
    nvidia_driver: str | None  # version
    tools: tuple[ToolFacts, ...]
    package_manager: str | None  # the system's, for remedies
    distributions: tuple[DistributionFacts, ...]
    requirements: tuple[RequirementFacts, ...]


def probe(*, isolate_torch: bool = False) -> CapabilityReport:
    """Collect all facts; takes about as long as importing torch.

    Args:
        isolate_torch: try torch in a child process, so that one that crashes is a finding and not the end.

    Example:
        report = probe()
        print(report.cpu.num_effective_cores, report.torch.version)
    """
    distributions = _distributions()
    return CapabilityReport(
        platform=PlatformFacts(
            system=platform.system(),
            release=platform.release(),
            machine=platform.machine(),
            python=platform.python_version(),
            implementation=platform.python_implementation(),
        ),
        cpu=_cpu(),
        memory=_memory(),
        torch=torch_facts_of_child() if isolate_torch else torch_facts(),
        triton=_version("triton"),
        nvidia_driver=_nvidia_driver(),
        tools=tuple(_tool(name) for name in TOOLS),
        package_manager=next((name for name in PACKAGE_MANAGERS if shutil.which(name)), None),
        distributions=distributions,
        requirements=tuple(
            fact for found in distributions if found.name in BUILT_IN for fact in requirements_of(found.name)
        ),
    )


def requirements_of(distribution: str) -> tuple[RequirementFacts, ...]:
    """Return the requirements of ``distribution`` in this environment (no extras), and whether each is met.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    from packaging.requirements import Requirement

    facts = []
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        is_satisfied = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        wanted = f"{requirement.name}{requirement.specifier}"
        facts.append(RequirementFacts(distribution, wanted, installed, is_satisfied))
    return tuple(facts)


def _cpu() -> CpuFacts:
    model, family, features = _model_and_features()
    try:
        import psutil
    except ImportError:  # broken, and reported as an unsatisfied requirement
        num_physical = None
    else:
        num_physical = psutil.cpu_count(logical=False)
    num_logical = os.cpu_count() or 1
    allowed = allowed_cores()
    quota = container_limits().cpu_quota_cores
    return CpuFacts(
        model=model,
        family=family,
        num_physical_cores=num_physical,
        num_logical_cores=num_logical,
        allowed_cores=None if allowed is None else tuple(sorted(allowed)),
        quota_cores=quota,
        num_effective_cores=effective_cores(num_logical if allowed is None else len(allowed), quota),
        features=tuple(name for name in CPU_FEATURES.get(family, {}) if name in features),
    )


def _model_and_features() -> tuple[str, str, frozenset[str]]:
    """Return (brand name, family, features). ``host()`` has only the features of the closest known model."""
    machine = platform.machine()
    try:
        from archspec.cpu import brand_string, host
        from archspec.cpu.detect import detected_info
    except ImportError:  # broken, and reported as an unsatisfied requirement
        return machine, machine, frozenset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = frozenset(detected_info().features)
        family = str(host().family)
        brand = (brand_string() or "").strip("\0 ")
    return brand or platform.processor() or machine, family, features


def _memory() -> MemoryFacts | None:
    try:
        return MemoryFacts(memory_now(), container_limits().memory_limit_nbytes)
    except ImportError:  # broken, and reported as an unsatisfied requirement
        return None


def _distributions() -> tuple[DistributionFacts, ...]:
    plugged = {entry.dist.name for entry in importlib.metadata.entry_points(group="mlsys.plugins") if entry.dist}
    names = [name for name in BUILT_IN if _version(name)] + sorted(plugged - set(BUILT_IN))
    return tuple(DistributionFacts(name, _version(name) or "unknown") for name in names)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    output, error = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.split()[0] if output and not error else None


def _tool(name: str) -> ToolFacts:
    output, error = _run(name, "--version")
    if output is None:
        return ToolFacts(name, error=error)
    found = re.search(r"\d+\.\d+(\.\d+)*", output)
    return ToolFacts(name, found[0] if found else "unknown")


def _run(program: str, *args: str) -> tuple[str | None, str | None]:
    """Return (output, None), (None, reason of failure), or (None, None) if the program is absent."""
    path = shutil.which(program)
    if path is None:
        return None, None
    try:
        done = subprocess.run([path, *args], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode:
        return None, f"{program} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
    return done.stdout, None
