"""The process's configuration, read from the environment once and in this module only.

Call :func:`settings` at an edge (a command, an app factory) and pass the values on; library code takes arguments.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# What the command line sets for its own process where the user has not. OpenMP workers that spin between operators keep
# a core from whoever else wants it: on a busy two-core host Orca decoded 2 tokens/s with the default and 40 with this.
PROCESS_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings read from the environment. Each field names its variable."""

    plugins: frozenset[str] | None  # MLSYS_PLUGINS=a,b: load only these plugins; None: all installed
    blocked_plugins: frozenset[str]  # MLSYS_PLUGINS_BLOCK=a,b: never load these
    plugins_strict: bool  # MLSYS_PLUGINS_STRICT=1: re-raise what a broken plugin raised
    cache_dir: Path  # MLSYS_CACHE_DIR, else the platform's user cache folder
    debug: bool  # MLSYS_DEBUG=1: the command line shows tracebacks of MlsysError too
    kernel_level: str = "native"  # MLSYS_KERNEL_LEVEL: instructions of native kernels; mlsys_core.native.levels
    sanitizer: str | None = None  # MLSYS_SANITIZE=address,undefined or =thread: kernels are built with them
    packed_nbytes: int = 20 << 30  # MLSYS_PACKED_GB: of all packed copies of models in the cache; 0: none are kept
    traces_in_environment: bool = (
        False  # OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT names a collector, and nothing forbids it
    )
    compiler: str | None = None  # CXX: the C++ compiler of native kernels; None: c++, g++ or clang++


def _names(value: str) -> frozenset[str]:
    return frozenset(name.strip() for name in value.split(",") if name.strip())


def _flag(value: str) -> bool:
    return value.strip().lower() in {"1", "true", "yes", "on"}


def _gigabytes(value: str) -> int:
    try:
        return int(float(value) * (1 << 30))
    except (ValueError, OverflowError):
        from mlsys_core.errors import InvalidInputError

        raise InvalidInputError(f"MLSYS_PACKED_GB is {value!r}; it may be a number of GiB, 0 for none") from None


def _has_traces(environ: dict[str, str] | os._Environ[str]) -> bool:
    """Return whether OpenTelemetry's own variables ask for traces; its SDK reads the rest of them."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_off = (
        _flag(environ.get("OTEL_SDK_DISABLED", "")) or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none"
    )
    return not is_off and any(environ.get(name, "").strip() for name in names)


def read_settings(environ: dict[str, str] | os._Environ[str]) -> Settings:
    """Return the settings in ``environ``; pure, for tests.

    Example:
        >>> read_settings({"MLSYS_PLUGINS": "orca, nimble"}).plugins == {"orca", "nimble"}
        True
    """
    cache = environ.get("MLSYS_CACHE_DIR")
    if not cache:
        import platformdirs  # here: not every command needs the cache folder's platform rules

        cache = platformdirs.user_cache_dir("mlsys")
    return Settings(
        plugins=_names(environ["MLSYS_PLUGINS"]) if environ.get("MLSYS_PLUGINS") else None,
        blocked_plugins=_names(environ.get("MLSYS_PLUGINS_BLOCK", "")),
        plugins_strict=_flag(environ.get("MLSYS_PLUGINS_STRICT", "")),
        cache_dir=Path(cache).expanduser(),
        debug=_flag(environ.get("MLSYS_DEBUG", "")),
        kernel_level=environ.get("MLSYS_KERNEL_LEVEL", "").strip() or "native",
        sanitizer=environ.get("MLSYS_SANITIZE", "").strip() or None,
        packed_nbytes=_gigabytes(environ.get("MLSYS_PACKED_GB", "").strip() or "20"),
        traces_in_environment=_has_traces(environ),
        compiler=environ.get("CXX", "").strip() or None,
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read on the first call."""
    return read_settings(os.environ)


def apply_process_defaults(environ: MutableMapping[str, str]) -> None:
    """Set :data:`PROCESS_DEFAULTS` where ``environ`` says nothing; for a process's owner, before torch is imported.

    Example:
        >>> environ = {"OMP_WAIT_POLICY": "ACTIVE"}
        >>> apply_process_defaults(environ)
        >>> environ["OMP_WAIT_POLICY"]
        'ACTIVE'
    """
    for name, value in PROCESS_DEFAULTS.items():
        environ.setdefault(name, value)
