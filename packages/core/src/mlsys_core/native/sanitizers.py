"""Kernels built with a sanitizer of the compiler's: ``MLSYS_SANITIZE``, as ``make sanitize`` sets it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mlsys_core.errors import InvalidInputError

# By name: flags, and the runtime that must be in the process before anything else.
_SANITIZERS = {
    "address": (("-fsanitize=address",), "libasan.so"),
    "undefined": (("-fsanitize=undefined,float-cast-overflow",), None),
    "thread": (("-fsanitize=thread",), "libtsan.so"),
}
_READABLE = ("-O1", "-g", "-fno-omit-frame-pointer")  # so that a report names lines


def flags_of(name: str | None) -> tuple[str, ...]:
    """Return the flags that build a kernel with the sanitizer called ``name``; None needs none.

    Raises:
        InvalidInputError: the name is unknown, or the sanitizer's runtime was not preloaded.
    """
    if name is None:
        return ()
    if name not in _SANITIZERS:
        raise InvalidInputError(f"MLSYS_SANITIZE is {name!r}; it may be {', '.join(_SANITIZERS)}")
    flags, runtime = _SANITIZERS[name]
    if runtime and not _is_in_process(runtime):  # it would end the process as the kernel is loaded
        raise InvalidInputError(
            f"MLSYS_SANITIZE={name} needs its runtime before anything else: "
            f"LD_PRELOAD=$(c++ -print-file-name={runtime}), or run make sanitize"
        )
    return (*_READABLE, *flags)


@cache
def _is_in_process(runtime: str) -> bool:
    try:
        return runtime in Path("/proc/self/maps").read_text()
    except OSError:
        return False
