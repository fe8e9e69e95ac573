"""Kernels built with one of the compiler's sanitizers: ``MLSYS_SANITIZE``, set by ``make sanitize``."""

from __future__ import annotations

from functools import cache

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import is_loaded

# By name: flags, and the runtime that must be in the process before anything else.
_SANITIZERS = {
    "address": (("-fsanitize=address",), "libasan.so"),
    "undefined": (("-fsanitize=undefined,float-cast-overflow",), None),
    "thread": (("-fsanitize=thread",), "libtsan.so"),
}
_READABLE = ("-O1", "-g", "-fno-omit-frame-pointer")  # so that a report names lines


def flags_of(names: str | None) -> tuple[str, ...]:
    """Return the flags that build a kernel with sanitizers.

    Args:
        names: One of them, or two with a comma between; None: no sanitizer.

    Raises:
        InvalidInputError: a name is unknown, two exclude each other, or a runtime was not preloaded.
    """
    if names is None:
        return ()
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in _SANITIZERS:
            raise InvalidInputError(
                f"MLSYS_SANITIZE is {names!r}; it may be {', '.join(_SANITIZERS)}, or two of them with a comma between"
            )
        runtime = _SANITIZERS[name][1]
        if runtime and not _is_in_process(runtime):  # it would end the process as the kernel is loaded
            raise InvalidInputError(
                f"MLSYS_SANITIZE={names} needs its runtime before anything else: "
                f"LD_PRELOAD=$(c++ -print-file-name={runtime}), or run make sanitize"
            )
    if {"address", "thread"} <= set(chosen):
        raise InvalidInputError("MLSYS_SANITIZE: address and thread exclude each other; use one process for each")
    return (*_READABLE, *(flag for name in chosen for flag in _SANITIZERS[name][0]))


@cache
def _is_in_process(runtime: str) -> bool:
    return is_loaded(runtime)
