"""Recipes of libraries: sources, options and level, and the key that names all of them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.native.levels import NATIVE, Level, cpu_flags

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
