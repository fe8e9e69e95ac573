"""Environment of a measurement: machine, versions and commit, written beside every figure that mlsys reports."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from mlsys_core.posix.machine import num_cores, processor_lines

_PACKAGES = ("torch", "triton", "numpy", "scikit-learn", "lightgbm")


def _commit() -> str:
    """Return the commit of this package's source tree, with '+changes' if it is dirty; 'unknown' when installed."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu_model() -> str:
    lines = processor_lines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown") if lines else platform.processor() or "unknown"


def describe_environment() -> dict[str, str]:
    """Return machine, versions, commit and time, as text; imports no torch.

    Example:
        >>> "python" in describe_environment()
        True
    """
    versions = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.name
        if name and (name in _PACKAGES or name.startswith("mlsys-")):
            versions[name] = distribution.version
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": str(num_cores()),
        "python": platform.python_version(),
        **dict(sorted(versions.items())),
    }
