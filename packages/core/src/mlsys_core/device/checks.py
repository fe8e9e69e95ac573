"""Findings about this machine and installation: each row gives a fact, a status, and the command that repairs it.

``broken`` means that this installation cannot work and makes ``mlsys doctor`` fail; ``missing`` is something optional
that would help here; ``info`` is neither good nor bad. Rows of one section are adjacent.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mlsys_core.device.limits import container_limits, effective_cores, memory_now
from mlsys_core.posix.machine import allowed_cores

Status = Literal["ok", "info", "missing", "broken"]

BUILT_IN = (
    "mlsys-core",
    "mlsys-serving",
    "mlsys-nimble",
    "mlsys-orca",
    "mlsys-windtunnel",
    "mlsys-batchmaker",
    "mlsys-dvabatch",
)

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


def system_checks() -> Iterator[Check]:
    """Yield rows on the operating system, the interpreter, memory, and the processor and this process's share of it."""
    yield Check("System", "platform", f"{platform.system()} {platform.release()} {platform.machine()}", "info")
    yield Check("System", "Python", f"{platform.python_version()} ({platform.python_implementation()})", "ok")
    limits = container_limits()
    try:
        import psutil
        from archspec.cpu import brand_string, host
        from archspec.cpu.detect import detected_info
    except ImportError:  # broken, and reported as an unsatisfied requirement
        return
    memory, limit = memory_now(), limits.memory_limit_nbytes
    value = f"{gib(memory.available_nbytes)} available of {gib(memory.total_nbytes)}"
    yield Check("System", "memory", value if limit is None else f"{value} (container limit {gib(limit)})", "ok")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = detected_info().features  # host() has only those of the closest known model
        family = str(host().family)
        model = (brand_string() or "").strip("\0 ") or platform.processor() or platform.machine()
    yield Check("Processor", "model", model, "info")
    num_logical, allowed = os.cpu_count() or 1, allowed_cores()
    num_allowed = num_logical if allowed is None else len(allowed)
    physical = psutil.cpu_count(logical=False) or "unknown"
    yield Check("Processor", "cores", f"{physical} physical, {num_logical} logical", "info")
    share = f"{effective_cores(num_allowed, limits.cpu_quota_cores)}"
    share += f"; affinity allows {num_allowed}" if num_allowed < num_logical else ""
    share += "" if limits.cpu_quota_cores is None else f"; container quota {limits.cpu_quota_cores:g}"
    yield Check("Processor", "usable by this process", share, "ok")
    for name, title in CPU_FEATURES.get(family, {}).items():
        yield Check("Processor", title, *(("yes", "ok") if name in features else ("no", "info")))


def gib(nbytes: int) -> str:
    """Return bytes as readable GiB.

    Example:
        >>> gib(3 * 2**29)
        '1.5 GiB'
    """
    return f"{nbytes / 2**30:.1f} GiB"


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none."""
    output, _ = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.split()[0] if output else None


def tool_checks(*, has_gpu: bool) -> Iterator[Check]:
    """Yield a row for each program that some part of mlsys calls: compilers, and npm for a data set.

    Args:
        has_gpu: There is an NVIDIA GPU, so that nvcc is of use.
    """
    found = {name: _run(name, "--version") for name in ("g++", "clang++", "nvcc", "npm")}
    compilers = [name for name in ("g++", "clang++") if found[name][0] is not None]
    for name, (output, error) in found.items():
        if output is not None:
            version = re.search(r"\d+\.\d+(\.\d+)*", output)
            yield Check("Tools", name, version[0] if version else "unknown", "ok")
        elif error is not None:
            yield Check("Tools", name, f"found, but does not run: {error}", "missing", _install(name))
        elif name.endswith("++") and (compilers or name == "clang++"):
            value = f"not found; {compilers[0]} serves" if compilers else "not found; either compiler will do"
            yield Check("Tools", name, value, "info")
        elif name == "nvcc" and not has_gpu:
            yield Check("Tools", name, "not found; of use with an NVIDIA GPU only", "info")
        else:
            yield Check("Tools", name, "not found", "missing", _install(name))


def _install(tool: str) -> str:
    command, packages = next((INSTALL[name] for name in INSTALL if shutil.which(name)), ("", {}))
    if tool not in packages:
        return f"install {tool} with this system's package manager"
    return f"{command} {packages[tool]}"


def package_checks() -> Iterator[Check]:
    """Yield a row for each distribution of mlsys or of a plugin, and for each unmet requirement of a built-in one."""
    plugged = {entry.dist.name for entry in importlib.metadata.entry_points(group="mlsys.plugins") if entry.dist}
    for name in [*BUILT_IN, *sorted(plugged - set(BUILT_IN))]:
        if found := version_of(name):
            yield Check("Packages", name, found, "ok")
        elif name == "mlsys-core":
            yield Check("Packages", name, "imported, but not installed", "broken", f"pip install {name}")
        else:
            yield Check("Packages", name, "not installed", "missing", f"pip install {name}")
    wanted = [(name, each) for name in BUILT_IN if version_of(name) for each in requirements_of(name)]
    unmet = [(name, *each) for name, each in wanted if each[1] is not None]
    for name, requirement, installed in unmet:
        value = f"{name} needs {requirement}, {installed} is installed"
        status: Status = "broken" if name == "mlsys-core" else "missing"
        yield Check("Packages", "requirement", value, status, f"pip install {shlex.quote(requirement)}")
    if wanted and not unmet:
        yield Check("Packages", "requirements", f"all {len(wanted)} satisfied", "ok")


def requirements_of(distribution: str) -> Iterator[tuple[str, str | None]]:
    """Yield the requirements of ``distribution`` without extras, such as "torch>=2.11".

    Beside each stands what is installed in its place, a version or "none"; None: it is satisfied.

    Raises:
        importlib.metadata.PackageNotFoundError: the distribution is not installed.
    """
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = version_of(requirement.name)
        satisfied = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        yield f"{requirement.name}{requirement.specifier}", None if satisfied else installed or "none"


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
