"""Small C++ kernels, compiled for this machine the first time they are wanted and kept in the cache.

A kernel is one C++17 file (and the headers it includes) with ``extern "C"`` functions over plain pointers, loaded
through ctypes. So a package needs no compiler to install, and a kernel uses all that this CPU has. Whoever calls
:func:`load_kernel` keeps a path in torch for machines without a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlsys_core.errors import MissingDependencyError, MlsysError

INCLUDE = Path(__file__).parent / "include"  # headers for any kernel, as <mlsys/vec.h>
COMPILERS = ("c++", "g++", "clang++")
# No fast-math: kernels promise the comparisons and sums of their sources. Contraction would fuse a*b+c.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")


def load_kernel(
    source: Path, *, cache_dir: Path, flags: tuple[str, ...] = (), headers: Sequence[Path] = ()
) -> ctypes.CDLL:
    """Compile ``source`` unless that was done before, and load it.

    Args:
        source: A C++17 file.
        cache_dir: Where libraries are kept, below ``native/``; safe for several processes at once.
        flags: Added to :data:`FLAGS`.
        headers: The files that ``source`` includes: it is compiled again when one of them changes, or one of the
            core's own (:data:`INCLUDE`).

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the file; its first lines are in the message.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise MissingDependencyError("no C++ compiler was found: apt-get install g++")
    options = [*FLAGS, *flags]
    shared = sorted(INCLUDE.rglob("*.h"))
    library = cache_dir / "native" / f"{source.stem}-{_key([source, *headers, *shared], compiler, options)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            built = Path(work) / library.name
            command = [compiler, *options, f"-I{INCLUDE}", str(source), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                first_lines = " | ".join(result.stderr.splitlines()[:5])
                raise MlsysError(f"{compiler} could not compile {source.name}: {first_lines}")
            built.replace(library)  # whole or not at all, whoever else builds it
    return ctypes.CDLL(str(library))


def _key(sources: Sequence[Path], compiler: str, options: list[str]) -> str:
    """What a library depends on: its sources, the compiler, the options, and the CPU that ``-march=native`` means."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = _cpu_flags() or platform.processor()
    digest = hashlib.sha256(
        "\0".join([*(file.read_text() for file in sources), version, *options, platform.machine(), cpu]).encode()
    )
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
