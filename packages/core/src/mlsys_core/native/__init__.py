"""Small C++ kernels: compiled in wheels, one library for each level, or on first use and kept in the cache.

A kernel is one C++17 file (and the headers it includes) with ``extern "C"`` functions over plain pointers, loaded
through ctypes. :class:`Kernel` names one. Callers keep a path in torch for machines that have neither a library that
fits nor a compiler, and say so with :func:`warn_without_kernels`.

``levels`` names the instruction sets and all inputs of a library, ``compiler`` runs the compiler, ``store``
keeps libraries that can be trusted, ``loader`` ties them together. ``declarations`` reads what a library declares of
its structs and functions, ``structs`` fills them.
"""

from mlsys_core.native.declarations import bind, expect
from mlsys_core.native.levels import FLAGS, INCLUDE, LEVELS, NATIVE, Level, builds, executable_levels
from mlsys_core.native.loader import Kernel, load_kernel, warn_without_kernels
from mlsys_core.native.structs import Struct, new

__all__ = [
    "FLAGS",
    "INCLUDE",
    "LEVELS",
    "NATIVE",
    "Kernel",
    "Level",
    "Struct",
    "bind",
    "builds",
    "executable_levels",
    "expect",
    "load_kernel",
    "new",
    "warn_without_kernels",
]
