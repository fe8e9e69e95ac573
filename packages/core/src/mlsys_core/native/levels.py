"""The instruction levels that kernels are compiled for, and the recipe of one library: all inputs but the compiler.

``MLSYS_KERNEL_LEVEL`` names one, and every kernel of the process is compiled for it: so an AVX-512 machine runs the
whole suite as one with AVX2 alone would. The default is ``native``, all that the processor has.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix.machine import processor_lines


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that a compiler may use."""

    name: str  # as MLSYS_KERNEL_LEVEL says it
    flags: tuple[str, ...]  # for GCC 11 and Clang 12, or newer
    needs: frozenset[str] = frozenset()  # words of /proc/cpuinfo: what the processor must have


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")

NATIVE = Level("native", ("-march=native",))
_X86 = (  # each has what the one before it has
    Level("x86-64", ("-march=x86-64",)),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Level("avx512-bf16", _BF16_FLAGS, _BF16),
    Level("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AMX),
)
_ARM = (Level("armv8-a", ("-march=armv8-a",)),)  # NEON, which each aarch64 has; kernels have no use for more


def levels_of(family: str) -> tuple[Level, ...]:
    """Return the levels of a family of processors, lowest first; none of a family that has ``native`` alone.

    Args:
        family: As ``platform.machine()`` says it: "x86_64", "aarch64".

    Example:
        >>> [level.name for level in levels_of("aarch64")]
        ['armv8-a']
    """
    return {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM}.get(family.lower(), ())


LEVELS: tuple[Level, ...] = levels_of(platform.machine())
"""Levels of this processor's family, lowest first, whether or not this processor executes them."""


@cache
def cpu_flags() -> str:
    """Return the line of /proc/cpuinfo that lists the processor's extensions; empty where there is none."""
    return next((line for line in processor_lines() if line.startswith(("flags", "Features"))), "")


def level_named(name: str, *, has: frozenset[str] | None = None) -> Level:
    """Return the level called ``name``.

    Args:
        name: ``native``, or one of :data:`LEVELS`.
        has: Extensions of the processor; None: this one's.

    Raises:
        InvalidInputError: no level has that name, or the processor lacks an extension that it needs.
    """
    found = {level.name: level for level in (NATIVE, *LEVELS)}.get(name)
    if found is None:
        names = ", ".join(level.name for level in (NATIVE, *LEVELS))
        raise InvalidInputError(f"MLSYS_KERNEL_LEVEL is {name!r}; it may be {names}")
    missing = found.needs - (frozenset(cpu_flags().split()) if has is None else has)
    if missing:
        best = executable_levels(has=has)[-1].name
        raise InvalidInputError(
            f"MLSYS_KERNEL_LEVEL is {name!r}, for which this processor lacks {', '.join(sorted(missing))}; "
            f"the highest that it executes is {best}"
        )
    return found


def executable_levels(*, has: frozenset[str] | None = None) -> tuple[Level, ...]:
    """Return the levels of :data:`LEVELS` that a processor executes, lowest first.

    Args:
        has: Its extensions as /proc/cpuinfo writes them; None: this processor's.

    Example:
        >>> [level.name for level in executable_levels(has=frozenset()) if level.needs]
        []
    """
    extensions = frozenset(cpu_flags().split()) if has is None else has
    return tuple(level for level in LEVELS if level.needs <= extensions)


def builds(chosen: str = "native") -> dict[str, tuple[str, ...]]:
    """Return the flags of every build that a kernel's own tests run on this machine, by name.

    One build for each level that the machine executes. ``chosen`` stands for the highest, as users have it; the others
    are less optimised, so that they compile sooner. Where no 512-bit registers are, a further build asks for vectors
    of 16 floats all the same: code for them is then at least executed in halves.

    Args:
        chosen: Value of ``MLSYS_KERNEL_LEVEL``: levels above it are left out.
    """
    levels = executable_levels()
    if chosen != NATIVE.name:
        levels = tuple(level for level in levels if level.needs <= level_named(chosen).needs)
    found: dict[str, tuple[str, ...]] = {chosen: ()}
    found.update({level.name: (*level.flags, "-O2") for level in levels[:-1]})
    if not levels or "avx512f" not in levels[-1].needs:
        found["wide"] = ("-DMLSYS_LANES=16", "-O2")
    return found


INCLUDE = Path(__file__).parents[1] / "include"  # headers for any kernel, as <mlsys/vec.h>
# No fast-math: kernels promise the comparisons and sums of their sources. Contraction would fuse a*b+c.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
SHIPPED = "_built"  # folder beside a source, with the libraries that came in the wheel


@dataclass(frozen=True, slots=True)
class Recipe:
    """All inputs of a library's build, except for the compiler."""

    source: Path
    level: Level
    options: tuple[str, ...]
    key: str  # names sources, options, and the processor where the options leave it open

    @property
    def stem(self) -> str:
        """Beginning of the names of this recipe's libraries, for any compiler."""
        return f"{self.source.stem}-{self.key}-"

    def name(self, version: str) -> str:
        """Return the name in the cache of the library by the compiler that says ``version`` of itself."""
        return f"{self.stem}{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"

    @property
    def shipped(self) -> Path:
        """Path of the library that a wheel brings: its name fits these sources and options, and no others."""
        return self.source.parent / SHIPPED / f"{self.source.stem}-{self.level.name}-{self.key}.so"


def this_machine() -> str:
    """Return the system and the processor's family, as keys name them.

    Example:
        >>> len(this_machine().split())
        2
    """
    return f"{platform.system()} {platform.machine()}"


def recipe(
    source: Path, level: Level, *, flags: Sequence[str] = (), headers: Sequence[Path] = (), machine: str | None = None
) -> Recipe:
    """Return the recipe of one library.

    Args:
        source: A C++17 file.
        level: Instructions that it may use.
        flags: Options after :data:`FLAGS` and the level's.
        headers: Files that ``source`` includes, beside the core's own.
        machine: System and family that it is built for, as :func:`this_machine` writes them; None: this one's.
    """
    texts = [file.read_bytes() for file in (source, *headers, *sorted(INCLUDE.rglob("*.h")))]
    options = (*FLAGS, *level.flags, *flags)
    cpu = (cpu_flags() or platform.processor()) if level == NATIVE else ""
    parts = [*texts, *(part.encode() for part in (*options, machine or this_machine(), cpu))]
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts))
    return Recipe(source, level, options, digest.hexdigest()[:16])
